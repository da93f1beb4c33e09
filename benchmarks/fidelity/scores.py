"""How good a ranking of tokens is: against exact OAR-P, against the truth, and by what happens when tokens go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.fidelity.responses import Response

TOP = 0.2
"""Share of the reasoning tokens whose overlap is reported."""

DELETED = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Shares of the reasoning tokens that the deletion curve replaces."""

RESAMPLES = 2000


def rank_correlation(score_R: Tensor, reference_R: Tensor) -> float:
    """Spearman's; 0 for scores that are all equal (they rank nothing), NaN where the reference is."""
    if bool((reference_R == reference_R[0]).all()):
        return math.nan
    if bool((score_R == score_R[0]).all()):
        return 0.0
    return float(np.corrcoef(_ranks(score_R), _ranks(reference_R))[0, 1])


def _ranks(score_R: Tensor) -> np.ndarray:
    """From 1; equal scores share the mean of their ranks."""
    _, place_R, count_U = np.unique(score_R.numpy(), return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(count_U) - (count_U - 1) / 2)[place_R]
    return ranks


def top_overlap(score_R: Tensor, reference_R: Tensor) -> float:
    """Share of the reference's top 20 % (at least one token) that is in the score's top 20 %."""
    count = max(1, round(TOP * len(score_R)))
    tops = [set(order(x)[:count].tolist()) for x in (score_R, reference_R)]
    return len(tops[0] & tops[1]) / count


def causal_recall(importance_BL: Tensor, keep_BL: Tensor, causal_BL: Tensor) -> Tensor:
    """Share of the tokens known to be causal among the top-k scores, k = their number, `[B]` (NaN where there are none)."""
    causal_BL = causal_BL & keep_BL
    order_BL = importance_BL.masked_fill(~keep_BL, -torch.inf).argsort(-1, descending=True)
    rank_BL = torch.empty_like(order_BL).scatter_(-1, order_BL, torch.arange(order_BL.shape[-1]).expand_as(order_BL))
    count_B1 = causal_BL.sum(-1, keepdim=True)
    return ((rank_BL < count_B1) & causal_BL).sum(-1) / count_B1[:, 0]


def recall(score_R: Tensor, causal_R: Tensor) -> float:
    """Share of the causal tokens among the top-k scores, k their number; NaN where there are none."""
    every_1R = torch.ones(1, len(score_R), dtype=torch.bool)
    return float(causal_recall(score_R[None], every_1R, causal_R[None])[0])


def order(score_R: Tensor) -> Tensor:
    """Indices from the largest score to the smallest; among equals the first comes first."""
    return score_R.argsort(descending=True, stable=True)


@torch.no_grad()
def deletion_curve(
    model: nn.Module, response: Response, scores: Mapping[str, Tensor], replacement_token: int
) -> dict[str, list[float]]:
    """The answer's probability as the tokens with the largest scores are replaced.

    Args:
        model: in eval mode.
        response: whose tokens are replaced.
        scores: `[R]` over the reasoning tokens, by estimator.
        replacement_token: what stands in for them.

    Returns:
        By estimator, for each share of `DELETED`: the probability of the answer (geometric mean over its tokens) over that
        of the untouched response.
    """
    start, end = response.answer
    reasoning_R = response.reasoning_R
    counts = [round(share * len(reasoning_R)) for share in DELETED]
    rows = {}
    for name, score_R in scores.items():
        ranked_R = reasoning_R[order(score_R)]
        for place, count in enumerate(counts):
            token_T = response.token_T[:end].clone()
            token_T[ranked_R[:count]] = replacement_token
            rows[name, place] = token_T
    # Estimators often agree on the first tokens: every sequence once.
    distinct = {tuple(sorted(_changed(token_T, response))): token_T for token_T in rows.values()}
    keys = list(distinct)
    device = next(model.parameters()).device
    found: list[float] = []
    for at in range(0, len(keys), 32):
        token_KT = torch.stack([distinct[key] for key in keys[at : at + 32]]).to(device)
        logits_KmV = model(input_ids=token_KT, use_cache=False).logits[:, start - 1 : end - 1].float()
        answer_Km = token_KT[:, start:end]
        found += logits_KmV.log_softmax(-1).gather(-1, answer_Km[..., None]).mean((1, 2)).exp().tolist()
    probability = dict(zip(keys, found, strict=True))
    whole = probability[()]
    return {
        name: [
            probability[tuple(sorted(_changed(rows[name, place], response)))] / whole for place in range(len(counts))
        ]
        for name in scores
    }


def _changed(token_T: Tensor, response: Response) -> list[int]:
    return (token_T != response.token_T[: len(token_T)]).nonzero()[:, 0].tolist()


def area(curve: Sequence[float]) -> float:
    """Under a deletion curve, over the width of the curve: 1 when nothing that is deleted matters."""
    return float(np.trapezoid(curve, DELETED) / (DELETED[-1] - DELETED[0]))


@dataclass(frozen=True)
class Mean:
    """A mean over responses with an interval.

    Attributes:
        value: the mean over groups of the groups' means; NaN without data.
        low: lower end, at 95 %.
        high: upper end.
        count: responses that went in.
    """

    value: float
    low: float
    high: float
    count: int

    @property
    def text(self) -> str:
        """With half the width of the interval."""
        return "" if math.isnan(self.value) else f"{self.value:.2f} ± {(self.high - self.low) / 2:.2f}"


def mean_over_groups(groups: Sequence[Sequence[float]], seed: int = 0) -> Mean:
    """Mean of the means of some groups (a group is a task and a seed), with a percentile bootstrap over responses.

    Responses are drawn again within each group. The interval therefore speaks about these tasks and these models, and not
    about models that another seed would give; those are reported one by one. NaN values are left out.
    """
    kept = [values for group in groups if len(values := np.array([x for x in group if not math.isnan(x)]))]
    if not kept:
        return Mean(math.nan, math.nan, math.nan, 0)
    source = np.random.default_rng(seed)
    means = np.mean([values[source.integers(0, len(values), (RESAMPLES, len(values)))].mean(1) for values in kept], 0)
    low, high = np.quantile(means, (0.025, 0.975))
    return Mean(float(np.mean([v.mean() for v in kept])), float(low), float(high), sum(map(len, kept)))
