"""Ratios of what was measured side by side, and what they are held against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from benchmarks.report import Table
from benchmarks.statistics import Estimate, median


@dataclass(frozen=True)
class Ratio:
    """A formula in letters of the candidates, and its target; without a limit it is only reported."""

    formula: str
    what: str
    limit: float | None = None
    at_most: bool = True
    stated_for: str | None = None
    """What the limit is stated for, where this run is something else."""

    def of(self, figures: pd.DataFrame) -> list[float]:
        """One value a row; none where a letter was not measured."""
        formula = self.formula.replace("mem", "")
        if not set(re.findall(r"[a-z]\w*[*']?", formula)) <= set(figures):
            return []
        return list(map(float, figures.eval(re.sub(r"\w+[*']", r"`\g<0>`", formula))))

    def verdict(self, estimate: Estimate, rounds: list[float]) -> str:
        if self.limit is None:
            return "for information"
        if self.stated_for is not None:
            return f"not judged: the target is stated for {self.stated_for}"
        if min(rounds) <= 0:
            return "not judged: too noisy, a round is below zero"
        return estimate.verdict(self.limit, self.at_most)


def ratio_table(
    title: str,
    ratios: Sequence[Ratio],
    figures: pd.DataFrame,
    cpu_seconds: pd.DataFrame | None = None,
    peaks: pd.DataFrame | None = None,
) -> Table:
    """The ratios whose letters were measured, in `figures` (a row a round) or, for `mem(letter)`, in `peaks` (one row).

    `cpu_seconds`: the same rounds in processor seconds, where they say something.
    """
    rows = []
    for ratio in ratios:
        of_memory = peaks is not None and "mem" in ratio.formula
        if rounds := ratio.of(peaks if of_memory else figures):
            estimate = Estimate(rounds[0], rounds[0], rounds[0], 1) if of_memory else median(rounds)
            cpu = "" if of_memory or cpu_seconds is None else f"{np.median(ratio.of(cpu_seconds)):.3g}"
            limit = "" if ratio.limit is None else f"{'<=' if ratio.at_most else '>='} {ratio.limit:g}"
            verdict = ratio.verdict(estimate, rounds)
            rows.append((f"`{ratio.formula}`", ratio.what, str(estimate), cpu, limit, verdict))
    return Table(title, ("ratio", "what", "median (95 %)", "CPU time", "target", "verdict"), rows)
