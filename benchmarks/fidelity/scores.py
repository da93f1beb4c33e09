"""How good a ranking of tokens is: against exact OAR-P, and against the truth."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from benchmarks.statistics import Estimate

TOP = 0.2
"""Share of the reasoning tokens whose overlap is reported."""


def judged(score_R: Tensor, reference_R: Tensor, causal_R: Tensor) -> dict[str, float]:
    """The figures of one estimator on one response."""
    everywhere_1R = torch.ones(1, len(score_R), dtype=torch.bool)
    return {
        "spearman": rank_correlation(score_R, reference_R),
        "beyond": beyond_position(score_R, reference_R),
        "overlap": top_overlap(score_R, reference_R),
        "recall": causal_recall(score_R[None], everywhere_1R, causal_R[None]).item(),
    }


def rank_correlation(score_R: Tensor, reference_R: Tensor) -> float:
    """Spearman's; 0 for scores that are all equal (they rank nothing), NaN where the reference is."""
    if (reference_R == reference_R[0]).all() or (score_R == score_R[0]).all():
        return math.nan if (reference_R == reference_R[0]).all() else 0.0
    return float(stats.spearmanr(score_R.numpy(), reference_R.numpy()).statistic)


def beyond_position(score_R: Tensor, reference_R: Tensor) -> float:
    """Correlation of ranks from which the best quadratic function of a token's position is taken; 0 where nothing is left."""
    place_R3 = np.vander(np.linspace(-1, 1, len(score_R)), 3)
    ranks = [stats.rankdata(x_R.numpy()) for x_R in (score_R, reference_R)]
    ours_R, theirs_R = (x_R - place_R3 @ np.linalg.lstsq(place_R3, x_R)[0] for x_R in ranks)
    scale = math.sqrt((ours_R @ ours_R) * (theirs_R @ theirs_R))
    return float(ours_R @ theirs_R / scale) if scale > 1e-6 else 0.0


def largest(score_R: Tensor, share: float) -> Tensor:
    """Where that share of the scores is, the largest first; among equals the first comes first."""
    return score_R.argsort(descending=True, stable=True)[: round(share * len(score_R))]


def top_overlap(score_R: Tensor, reference_R: Tensor) -> float:
    """Share of the reference's top 20 % (at least one token) that is in the score's top 20 %."""
    share = max(TOP, 1 / len(score_R))
    ours, theirs = (set(largest(x_R, share).tolist()) for x_R in (score_R, reference_R))
    return len(ours & theirs) / len(theirs)


def causal_recall(importance_BL: Tensor, keep_BL: Tensor, causal_BL: Tensor) -> Tensor:
    """Share of the tokens known to be causal among the top-k scores, k = their number, `[B]` (NaN where there are none)."""
    causal_BL = causal_BL & keep_BL
    order_BL = importance_BL.masked_fill(~keep_BL, -torch.inf).argsort(-1, descending=True)
    rank_BL = torch.empty_like(order_BL).scatter_(-1, order_BL, torch.arange(order_BL.shape[-1]).expand_as(order_BL))
    count_B1 = causal_BL.sum(-1, keepdim=True)
    return ((rank_BL < count_B1) & causal_BL).sum(-1) / count_B1[:, 0]


def auc(score_R: np.ndarray, positive_R: np.ndarray) -> float:
    """How often a score of `positive_R` (bool) is above one of the others, equal ones a half; NaN without one of either."""
    positives, others = int(positive_R.sum()), int((~positive_R).sum())
    if not positives or not others:
        return math.nan
    return float((stats.rankdata(score_R)[positive_R].mean() - (positives + 1) / 2) / others)


def mean_over_groups(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean of the means of some groups (a group is a task and a model), with a percentile bootstrap over responses.

    Responses are drawn again within each group. The interval therefore speaks about these tasks and these models, and not
    about models that another seed would give. NaN values are left out.
    """
    kept = [values for group in groups if len(values := np.array([x for x in group if not math.isnan(x)]))]
    if not kept:
        return Estimate(math.nan)

    def mean(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.mean([sample.mean(axis) for sample in samples], 0)

    # scipy wants two values of each group; a single one drawn again is always itself.
    samples = [values.repeat(2) if len(values) == 1 else values for values in kept]
    drawn = stats.bootstrap(samples, mean, n_resamples=2000, method="percentile", rng=np.random.default_rng(0))
    low, high = drawn.confidence_interval
    return Estimate(float(mean(*kept)), float(low), float(high), sum(map(len, kept)))
