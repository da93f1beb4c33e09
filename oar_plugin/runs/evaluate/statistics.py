"""avg@k, pass@k and maj@k of each problem, and their means with standard errors.

Shapes: P problems, K responses of each, S seeds (training runs of one method).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oar_plugin.runs.intervals import half_95

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
        # An error of 0 is no certainty: all problems merely had the same value.
        return self.se > 0 and (self.low > 0 or self.high < 0)


def average(correct_PK: NDArray[np.bool_]) -> Values:
    """avg@K of each problem: the share of its responses that are right."""
    means: Values = correct_PK.mean(axis=1)
    return means


def pass_at(k: int, correct_PK: NDArray[np.bool_]) -> Values:
    """pass@k of each problem: the chance that k of its responses, drawn without replacement, hold a right one.

    Unbiased (Chen et al. 2021, arXiv 2107.03374). At k = K it is whether any is right.
    """
    samples = correct_PK.shape[1]
    none_right = [math.comb(samples - right, k) / math.comb(samples, k) for right in correct_PK.sum(axis=1).tolist()]
    return 1.0 - np.array(none_right)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """maj@K of one problem: whether the answer that most responses give is right.

    Responses without an answer do not vote. Of answers with equally many votes each counts in part. All responses with one
    answer are taken to be as right as they are on average: two spellings that were graded unlike can fall together.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    first = {answer for answer, count in votes.items() if count == most}
    return float(np.mean([right for answer, right in zip(answers, correct, strict=True) if answer in first]))


def estimate(values: Sequence[Values], minus: Sequence[Values] | None = None) -> Estimate:
    """The mean over problems, and over data sets if there are several, each counting the same.

    Args:
        values: for each data set, (S, P).
        minus: of the baseline, whose problems are the same: the result is then the mean of paired differences.

    The standard error has two parts. Over problems: the spread of the problems' values, in which the sampling of responses and
    of problems both show. Over seeds, where a method has several: the spread of its runs' means beyond what their problems and
    responses explain. With one seed that part is unknown and left out.
    """
    base = minus if minus is not None else [np.zeros_like(block[:1]) for block in values]
    sets = len(values)
    of_problems = [block.mean(axis=0) - other.mean(axis=0) for block, other in zip(values, base, strict=True)]
    mean = float(np.mean([difference.mean() for difference in of_problems]))
    parts = [(_variance(each) / len(each) / sets**2, len(each) - 1) for each in of_problems]
    parts += [(_between_seeds(blocks), len(blocks[0]) - 1) for blocks in (values, base)]
    half = half_95(parts)
    return Estimate(mean, math.sqrt(sum(part for part, _ in parts)), mean - half, mean + half)


def _between_seeds(blocks: Sequence[Values]) -> float:
    """The variance of the mean that comes from seeds alone, 0 where there is one seed.

    The runs' means differ also because each has its own responses; that is in the problems' part, and taken off here.
    """
    seeds = len(blocks[0])
    if seeds == 1:
        return 0.0
    of_runs = np.mean([block.mean(axis=1) for block in blocks], axis=0)
    by_chance = 0.0
    for block in blocks:
        rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
        freedom = (seeds - 1) * (block.shape[1] - 1)
        if freedom > 0:
            by_chance += float((rest**2).sum()) / freedom / block.shape[1] / len(blocks) ** 2
    return max(0.0, _variance(of_runs) - by_chance) / seeds


def _variance(values: Values) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0
