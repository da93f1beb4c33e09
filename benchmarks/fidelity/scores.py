"""How good a ranking of tokens is: against exact OAR-P, against the truth, and by what happens when tokens go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from benchmarks.fidelity.responses import Response
from benchmarks.statistics import Estimate

TOP = 0.2
"""Share of the reasoning tokens whose overlap is reported."""

DELETED = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Shares of the reasoning tokens that the deletion curve replaces."""


def judged(score_R: Tensor, reference_R: Tensor, causal_R: Tensor | None, curve: list[float] | None) -> dict[str, Any]:
    """Every figure of one estimator on one response; NaN and None where causes or the deletion curve are not known."""
    recalls = [math.nan, math.nan]
    if causal_R is not None:
        pair_2R = torch.stack([score_R, reference_R])
        recalls = causal_recall(pair_2R, torch.ones_like(pair_2R, dtype=torch.bool), causal_R[None]).tolist()
    return {
        "spearman": rank_correlation(score_R, reference_R),
        "overlap": top_overlap(score_R, reference_R),
        "recall": recalls[0],
        "recall_gap": recalls[0] - recalls[1],
        "area": area(curve) if curve else math.nan,
        "curve": curve,
    }


def rank_correlation(score_R: Tensor, reference_R: Tensor) -> float:
    """Spearman's; 0 for scores that are all equal (they rank nothing), NaN where the reference is."""
    if (reference_R == reference_R[0]).all() or (score_R == score_R[0]).all():
        return math.nan if (reference_R == reference_R[0]).all() else 0.0
    return float(stats.spearmanr(score_R.numpy(), reference_R.numpy()).statistic)


def top(score_R: Tensor) -> list[int]:
    """Where the 20 % largest scores are, the largest first; at least one."""
    return order(score_R)[: max(1, round(TOP * len(score_R)))].tolist()


def order(score_R: Tensor) -> Tensor:
    """Indices from the largest score to the smallest; among equals the first comes first."""
    return score_R.argsort(descending=True, stable=True)


def top_overlap(score_R: Tensor, reference_R: Tensor) -> float:
    """Share of the reference's top 20 % that is in the score's top 20 %."""
    return len({*top(score_R)} & {*top(reference_R)}) / len(top(reference_R))


def causal_recall(importance_BL: Tensor, keep_BL: Tensor, causal_BL: Tensor) -> Tensor:
    """Share of the tokens known to be causal among the top-k scores, k = their number, `[B]` (NaN where there are none)."""
    causal_BL = causal_BL & keep_BL
    order_BL = importance_BL.masked_fill(~keep_BL, -torch.inf).argsort(-1, descending=True)
    rank_BL = torch.empty_like(order_BL).scatter_(-1, order_BL, torch.arange(order_BL.shape[-1]).expand_as(order_BL))
    count_B1 = causal_BL.sum(-1, keepdim=True)
    return ((rank_BL < count_B1) & causal_BL).sum(-1) / count_B1[:, 0]


@torch.no_grad()
def deletion_curves(
    model: nn.Module, response: Response, scores: Mapping[str, Tensor], replacement_token: int
) -> dict[str, list[float]]:
    """The answer's probability (geometric mean over its tokens) as the tokens with the largest scores are replaced.

    By estimator (`scores` are its `[R]`), for each share of `DELETED`: over that of the untouched response.
    """
    start, end = response.answer
    reasoning_R = response.reasoning_R
    gone = {
        (name, share): frozenset(reasoning_R[order(score_R)[: round(share * len(score_R))]].tolist())
        for name, score_R in scores.items()
        for share in DELETED
    }
    distinct = list(dict.fromkeys(gone.values()))  # estimators often agree on the first tokens
    token_KT = response.token_T[:end].repeat(len(distinct), 1)
    for row, places in enumerate(distinct):
        token_KT[row, list(places)] = replacement_token
    found: list[float] = []
    for part_KT in token_KT.to(next(model.parameters()).device).split(32):
        logits_KmV = model(input_ids=part_KT, use_cache=False).logits[:, start - 1 : end - 1].float()
        found += logits_KmV.log_softmax(-1).gather(-1, part_KT[:, start:end, None]).mean((1, 2)).exp().tolist()
    probability = dict(zip(distinct, found, strict=True))
    return {name: [probability[gone[name, share]] / probability[frozenset()] for share in DELETED] for name in scores}


def area(curve: Sequence[float]) -> float:
    """Under a deletion curve, over the width of the curve: 1 when nothing that is deleted matters."""
    return float(np.trapezoid(curve, DELETED) / (DELETED[-1] - DELETED[0]))


def mean_over_groups(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean of the means of some groups (a group is a task and a model), with a percentile bootstrap over responses.

    Responses are drawn again within each group. The interval therefore speaks about these tasks and these models, and not
    about models that another seed would give. NaN values are left out.
    """
    kept = [values for group in groups if len(values := np.array([x for x in group if not math.isnan(x)]))]
    if not kept:
        return Estimate(math.nan, math.nan, math.nan, 0)

    def mean(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.mean([sample.mean(axis) for sample in samples], 0)

    # scipy wants two values of each group; a single one drawn again is always itself.
    samples = [values.repeat(2) if len(values) == 1 else values for values in kept]
    drawn = stats.bootstrap(samples, mean, n_resamples=2000, method="percentile", rng=np.random.default_rng(0))
    low, high = drawn.confidence_interval
    return Estimate(float(mean(*kept)), float(low), float(high), sum(map(len, kept)))
