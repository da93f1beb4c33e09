"""avg@k, pass@k and maj@k of each problem, and their means with standard errors and 95 % intervals.

Shapes: P problems, K responses of each, S seeds (training runs of one method).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and 95 % interval."""

    mean: float
    se: float
    low: float
    high: float

    @property
    def leaves_out_zero(self) -> bool:
        # A standard error of 0 does not mean certainty: all problems merely had the same value.
        return self.se > 0 and (self.low > 0 or self.high < 0)


def half_95(parts: Sequence[tuple[float, float]]) -> float:
    """Return half the 95 % interval of a mean or of a difference of means, by Student's t (Welch and Satterthwaite).

    Args:
        parts: the summands of the variance, each with its degrees of freedom; 0 marks a summand that could not be estimated.
    """
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / freedom for part, freedom in parts if freedom > 0)
    freedom = variance**2 / spread if spread > 0 else math.inf
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)


def average(correct_PK: NDArray[np.bool_]) -> Values:
    """Return avg@K of each problem: the share of its responses that are correct."""
    means: Values = correct_PK.mean(axis=1)
    return means


def pass_at(k: int, correct_PK: NDArray[np.bool_]) -> Values:
    """Return pass@k of each problem: the chance that k of its responses, drawn without replacement, include a correct one.

    The estimate is unbiased (Chen et al. 2021, arXiv 2107.03374). At k = K it is 1 if any response is correct, else 0.
    """
    samples = correct_PK.shape[1]
    none_right = [math.comb(samples - right, k) / math.comb(samples, k) for right in correct_PK.sum(axis=1).tolist()]
    return 1.0 - np.array(none_right)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return maj@K of one problem: the mean grade of the responses with the most frequent answer.

    Responses without an answer (None) do not vote. If several answers are equally frequent, the mean is over all of their
    responses. A mean is needed even for one answer: responses with the same canonical answer can have different grades.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    chosen = {answer for answer, count in votes.items() if count == most}
    return float(np.mean([right for answer, right in zip(answers, correct, strict=True) if answer in chosen]))


def estimate(values: Sequence[Values], minus: Sequence[Values] | None = None) -> Estimate:
    """Return the mean over problems; data sets have equal weights.

    Args:
        values: one array (S, P) per data set.
        minus: the baseline's arrays for the same problems; if given, the result is the mean of the paired differences.

    The variance has two parts. Over problems: the variance of the problems' values, caused by the choice of problems and the
    sampling of responses. Over seeds, if there are several: the variance of the runs' means beyond what the sampling of
    responses explains. With one seed this part is unknown and left out.
    """
    base = minus if minus is not None else [np.zeros_like(block[:1]) for block in values]
    differences = [block.mean(axis=0) - other.mean(axis=0) for block, other in zip(values, base, strict=True)]
    mean = float(np.mean([each.mean() for each in differences]))
    parts = [(_variance(each) / len(each) / len(values) ** 2, len(each) - 1) for each in differences]
    parts += [(_between_seeds(blocks), len(blocks[0]) - 1) for blocks in (values, base)]
    half = half_95(parts)
    return Estimate(mean, math.sqrt(sum(part for part, _ in parts)), mean - half, mean + half)


def _between_seeds(blocks: Sequence[Values]) -> float:
    """Return the variance of the mean that is caused by seeds alone; 0 with one seed.

    The runs' means also differ because each run has its own responses. The part over problems already contains that variance,
    so it is subtracted here.
    """
    seeds = len(blocks[0])
    if seeds == 1:
        return 0.0
    run_means = np.mean([block.mean(axis=1) for block in blocks], axis=0)
    by_chance = 0.0
    for block in blocks:
        rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
        freedom = (seeds - 1) * (block.shape[1] - 1)
        if freedom > 0:
            by_chance += float((rest**2).sum()) / freedom / block.shape[1] / len(blocks) ** 2
    return max(0.0, _variance(run_means) - by_chance) / seeds


def _variance(values: Values) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0
