"""Ratios of what was measured, what they are held against, and how a page shows them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Target:
    """A figure, and what it is held against.

    Attributes:
        name: what the figure is, in words.
        formula: in letters of the candidates.
        value: ratio of medians.
        low: smallest ratio of a single round; None where rounds do not matter.
        high: largest ratio of a single round.
        cpu_value: the same ratio of processor seconds, which other work on the machine moves less; None on a GPU.
        limit: what it is held against, None for a figure that is only reported.
        at_most: whether the limit is an upper one.
        stated_for: the conditions that the target is stated for, when this run does not meet them.
    """

    name: str
    formula: str
    value: float
    low: float | None = None
    high: float | None = None
    cpu_value: float | None = None
    limit: float | None = None
    at_most: bool = True
    stated_for: str | None = None

    @property
    def verdict(self) -> str:
        """`reached`, `not reached` or why there is none."""
        if self.limit is None:
            return "for information"
        if self.stated_for is not None:
            return f"not judged: the target is stated for {self.stated_for}"
        if self.low is not None and self.high is not None and (self.low <= 0 or self.low <= self.limit <= self.high):
            return "not judged: too noisy, single rounds disagree"
        return "reached" if (self.value <= self.limit if self.at_most else self.value >= self.limit) else "NOT reached"

    @property
    def cpu_text(self) -> str:
        """The ratio of processor seconds."""
        return "" if self.cpu_value is None else f"{self.cpu_value:.3g}"

    @property
    def limit_text(self) -> str:
        """The limit with its sign."""
        return "" if self.limit is None else f"{'<=' if self.at_most else '>='} {self.limit:g}"

    @property
    def range_text(self) -> str:
        """The ratios of single rounds."""
        return "" if self.low is None else f"{self.low:.3g} .. {self.high:.3g}"


def ratio(
    name: str,
    formula: str,
    of: Callable[..., float],
    series: Sequence[Sequence[float]],
    cpu_series: Sequence[Sequence[float]] | None = None,
    **limit: Any,
) -> Target:
    """A ratio of medians, with its range over single rounds.

    Args:
        name: see `Target`.
        formula: see `Target`.
        of: the ratio, of one number a series.
        series: one number a round each, all of one length.
        cpu_series: the same rounds in processor seconds.
        limit: `limit`, `at_most` and `stated_for` of the target.
    """
    rounds = [of(*values) for values in zip(*series, strict=True)]
    value = of(*map(statistics.median, series))
    cpu_value = None if cpu_series is None else of(*map(statistics.median, cpu_series))
    return Target(name, formula, value, min(rounds), max(rounds), cpu_value, **limit)


def target_table(targets: Sequence[Target], title: str = "ratios and targets") -> Table:
    """For the terminal: a line a ratio."""
    shown = Table(title=title)
    for name in ("what", "ratio", "value", "single rounds", "CPU time", "target", "verdict"):
        shown.add_column(name, justify="right" if name == "value" else "left", no_wrap=name == "ratio")
    for target in targets:
        colour = {"reached": "green", "NOT reached": "red"}.get(target.verdict, "dim")
        shown.add_row(
            target.name,
            target.formula,
            f"{target.value:.3g}",
            target.range_text,
            target.cpu_text,
            target.limit_text,
            f"[{colour}]{target.verdict}[/]",
        )
    return shown


def target_lines(targets: Sequence[Target]) -> list[str]:
    """For a Markdown page: the same table."""
    lines = ["| ratio | | value | single rounds | CPU time | target | |", "|---|---|---|---|---|---|---|"]
    for target in targets:
        cells = (
            target.name.strip(),
            f"`{target.formula}`",
            f"{target.value:.3g}",
            target.range_text,
            target.cpu_text,
            target.limit_text,
        )
        lines.append(f"| {' | '.join(cells)} | {target.verdict} |")
    return lines
