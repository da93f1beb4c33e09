"""Medians, ratios and differences with 95 % intervals, from scipy and statsmodels; and what ratios are held against."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.robust_compare import TrimmedMean

from benchmarks.report import Table


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; the interval is NaN where there are too few values for one."""

    value: float
    low: float = np.nan
    high: float = np.nan
    count: int = 0

    def __str__(self) -> str:
        interval = "" if np.isnan(self.low) or self.low == self.high else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.3g}{interval}"

    def verdict(self, limit: float, at_most: bool = True) -> str:
        """`reached` or `NOT reached` where the whole interval is on one side of the limit, else why it is not judged."""
        if np.isnan(self.low):
            return "not judged: too few values for an interval"
        if self.low <= limit <= self.high:
            return "not judged: the interval holds the limit"
        return "reached" if (self.value < limit) == at_most else "NOT reached"


def median(values: Sequence[float]) -> Estimate:
    """The median; its interval is that of the sign test, which assumes nothing about how values are distributed."""
    values_N = np.asarray(values, dtype=float)
    value, count = float(np.median(values_N)), len(values_N)
    if count < 6:  # the sign test of five cannot reject anything at 5 %
        return Estimate(value, count=count)
    interval = stats.quantile_test(values_N, p=0.5).confidence_interval(0.95)
    return Estimate(value, float(interval.low), float(interval.high), count)


def ratio_of_medians(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Estimate:
    """One median over another, of values that were not measured side by side; the interval is a bootstrap over both."""

    def statistic(above_N: np.ndarray, below_N: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(above_N, axis=axis) / np.median(below_N, axis=axis)

    value, count = float(statistic(np.asarray(above), np.asarray(below))), min(len(above), len(below))
    if count < 3:
        return Estimate(value, count=count)
    source = np.random.default_rng(seed)
    found = stats.bootstrap((above, below), statistic, method="percentile", rng=source).confidence_interval
    return Estimate(value, float(found.low), float(found.high), count)


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[Estimate, float]:
    """The mean of paired differences with the interval of the paired t-test, and that test's p-value (NaN below two pairs)."""
    difference_N = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    count = len(difference_N)
    value = float(difference_N.mean()) if count else np.nan
    if count < 2 or np.ptp(difference_N) == 0:
        return Estimate(value, count=count), np.nan
    test = stats.ttest_1samp(difference_N, 0.0)
    interval = test.confidence_interval(0.95)
    return Estimate(value, float(interval.low), float(interval.high), count), float(test.pvalue)


def mean_over_clusters(clusters: Sequence[Sequence[float]], trim: float = 0.0) -> tuple[Estimate, float]:
    """The mean of the clusters' means with the interval of a t-test over clusters, and its p-value (NaN below two clusters).

    What differs between clusters (models that pairs started from) is in the interval; how many values a cluster has is not.

    `trim`: share of the clusters, rounded down, that the mean leaves out at each end; interval and p are then those of Yuen's
    t-test for trimmed means (Biometrika 61, 1974), which uses the winsorized variance.
    """
    means = [float(np.mean(values)) for values in clusters]
    if int(trim * len(means)) == 0:
        return mean_difference(means, [0.0] * len(means))
    trimmed = TrimmedMean(means, trim)
    value, error = float(trimmed.mean_trimmed), float(trimmed.std_mean_trimmed)
    if error == 0:
        return Estimate(value, count=len(means)), np.nan
    _, p, freedom = trimmed.ttest_mean()
    reach = error * stats.t.ppf(0.975, freedom)
    return Estimate(value, value - reach, value + reach, len(means)), float(p)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number; NaN stays NaN and does not count."""
    p_N = np.asarray(p_values, dtype=float)
    known_N = ~np.isnan(p_N)
    if known_N.any():
        p_N[known_N] = multipletests(p_N[known_N], method="holm")[1]
    return [float(p) for p in p_N]


@dataclass(frozen=True)
class Ratio:
    """A formula in letters of what was measured side by side, and its target; without a limit it is only reported."""

    formula: str
    what: str
    limit: float | None = None
    at_most: bool = True
    stated_for: str | None = None  # what the limit is stated for, where this run is something else

    def of(self, figures: pd.DataFrame) -> list[float]:
        """One value a row; none where a letter was not measured."""
        if not set(re.findall(r"[a-z]\w*", self.formula)) <= set(figures):
            return []
        return list(map(float, figures.eval(self.formula)))

    def verdict(self, estimate: Estimate) -> str:
        if self.limit is None:
            return "for information"
        if self.stated_for is not None:
            return f"not judged: the target is stated for {self.stated_for}"
        if estimate.low <= 0:
            return "not judged: too noisy, the interval reaches below zero"
        return estimate.verdict(self.limit, self.at_most)


def ratio_table(title: str, ratios: Sequence[Ratio], figures: pd.DataFrame) -> Table:
    """The ratios whose letters were measured, in `figures` (a row a round)."""
    rows = []
    for ratio in ratios:
        if rounds := ratio.of(figures):
            estimate = median(rounds)
            limit = "" if ratio.limit is None else f"{'<=' if ratio.at_most else '>='} {ratio.limit:g}"
            rows.append((f"`{ratio.formula}`", ratio.what, str(estimate), limit, ratio.verdict(estimate)))
    return Table(title, ("ratio", "what", "median (95 %)", "target", "verdict"), rows)
