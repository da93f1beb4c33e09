"""What `oar bench fidelity` says: tables for the terminal and a Markdown page, a JSON file, plots, verdicts on two targets."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.fidelity.estimators import REFERENCE
from benchmarks.fidelity.measure import Dtype, Judged, Measured, Result
from benchmarks.fidelity.scores import DELETED, Mean, mean_over_groups
from benchmarks.fidelity.sources import FAITHFUL
from benchmarks.importance import DEFAULT
from benchmarks.machine import machine_line
from benchmarks.plots import pyplot

BASELINE = f"{DEFAULT} 1"
"""What others are compared with: the package's default importance."""

RECALL_LOSS = 0.03
"""How far the recall of causal tokens may be below exact OAR-P's."""

METRICS = ("spearman", "overlap", "recall", "area", "recall_gap")


@dataclass(frozen=True)
class Goal:
    """A target: at least this overlap for at most this cost.

    Attributes:
        overlap: of the top 20 % with exact OAR-P.
        passes: forward and backward passes together.
        text: of the cost.
    """

    overlap: float
    passes: float
    text: str


GOALS = (
    Goal(0.80, 2.0, "one forward and one backward"),
    Goal(0.90, 4.5, "4.5 passes (1.5 times OAR-G's two forwards and one backward)"),
)


@dataclass(frozen=True)
class Row:
    """One estimator over some sources.

    Attributes:
        name: of the estimator.
        means: by metric.
        gain: overlap less the baseline's on the same responses.
        forward: passes.
        backward: passes.
        seconds: over those of a plain forward; medians, then the median over sources.
    """

    name: str
    means: dict[str, Mean]
    gain: Mean
    forward: float
    backward: float
    seconds: float

    @property
    def passes(self) -> float:
        """Forward and backward: a backward to the inputs alone costs about a forward."""
        return self.forward + self.backward


Chosen = Callable[[Measured, int], bool]


def _every(measured: Measured, index: int) -> bool:
    return True


class Summary:
    """The rows of a result."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.names = [estimator.name for estimator in result.estimators]

    def rows(self, dtype: Dtype, chosen: Chosen = _every) -> list[Row]:
        """One an estimator, over the responses that `chosen(source, index)` is true for."""
        sources = [measured for measured in self.result.measured if measured.dtype == dtype]
        return [self._row(name, sources, chosen) for name in self.names if all(name in m.judged for m in sources)]

    def _row(self, name: str, sources: Sequence[Measured], chosen: Chosen) -> Row:
        def groups(metric: Callable[[Measured, int], float]) -> Mean:
            return mean_over_groups([[metric(m, i) for i in range(len(m.correct)) if chosen(m, i)] for m in sources])

        def of(metric: str) -> Callable[[Measured, int], float]:
            return lambda m, i: float(getattr(m.judged[name][i], metric))

        costs = [m.costs[name] for m in sources if m.costs]
        return Row(
            name,
            {metric: groups(of(metric)) for metric in METRICS},
            groups(lambda m, i: m.judged[name][i].overlap - m.judged[BASELINE][i].overlap),
            statistics.fmean(cost.forward for cost in costs),
            statistics.fmean(cost.backward for cost in costs),
            statistics.median(cost.seconds for cost in costs),
        )

    @cached_property
    def dtypes(self) -> list[Dtype]:
        """In the order in which they ran."""
        return list(dict.fromkeys(measured.dtype for measured in self.result.measured))

    @cached_property
    def main(self) -> list[Row]:
        """All responses, in the first dtype."""
        return self.rows(self.dtypes[0])

    @cached_property
    def tasks(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(measured.task for measured in self.result.measured))

    @cached_property
    def knows_causes(self) -> bool:
        """Whether causal tokens are known."""
        return not all(math.isnan(row.means["recall"].value) for row in self.main)

    @cached_property
    def knows_right(self) -> bool:
        """Whether there are right and wrong responses."""
        found = {correct for measured in self.result.measured for correct in measured.correct}
        return {True, False} <= found


def verdicts(summary: Summary) -> list[str]:
    """For each goal, who reaches it: with the lower end of the interval too, or with the mean alone."""
    lines = []
    for goal in GOALS:
        able = [
            row
            for row in summary.main
            if row.passes <= goal.passes + 0.05
            and not row.name.startswith(REFERENCE)
            and not row.means["recall_gap"].value < -RECALL_LOSS
        ]
        best = max(able, key=lambda row: row.means["overlap"].value, default=None)
        text = f"Target: overlap of at least {goal.overlap:.2f} for at most {goal.text}"
        if summary.knows_causes:
            text += f", recall of causal tokens at most {RECALL_LOSS} below exact OAR-P's"
        if best is None:
            lines.append(f"{text}: NOT reached, nobody is cheap enough.")
            continue
        overlap = best.means["overlap"]
        verdict = "NOT reached" if overlap.value < goal.overlap else "reached by the mean, not by the interval"
        if overlap.low >= goal.overlap:
            verdict = "reached"
        lines.append(f"{text}: {verdict}; the best is `{best.name}` with {overlap.text} for {best.passes:.1f} passes.")
    return lines


def notes(summary: Summary) -> list[str]:
    """What a reader must know before quoting a figure."""
    result = summary.result
    settings = result.settings
    first = [m for m in result.measured if m.dtype == summary.dtypes[0]]
    counted = sum(len(m.correct) for m in first)
    lines = [
        f"{counted} responses, on average {statistics.fmean(r for m in first for r in m.reasoning):.0f} reasoning "
        f"tokens each; probe {settings.probe}; {sum(m.unusable for m in first)} more without an answer or without "
        "reasoning were left out.",
        "Reference: exact OAR-P (PAD) in float32. Spearman and overlap are with it; the overlap is of the 20 % largest scores.",
        "Intervals (±, half the width at 95 %) are percentile bootstraps over responses within each task and model seed. They "
        "say nothing about models of other seeds; those are told apart below.",
        "Passes count tokens that went through the layers, over those of the micro-batch: masked copies read the prefix from a "
        "cache. A backward to the inputs alone costs about a forward. Seconds: median of rounds, all in turn, over "
        "one plain forward with logits. On models this small they are mostly the overhead of calls.",
        "Deletion: the answer's probability (geometric mean over its tokens, untouched = 1) as the tokens with the largest "
        f"scores are replaced by PAD, up to {DELETED[-1]:.0%} of the reasoning; the area under it. Smaller is better, "
        f"`random` is the baseline; the first {settings.curves} responses of each source.",
    ]
    if summary.knows_causes:
        models = "; ".join(
            f"{m.task} {m.seed} {m.right:.0%} / {m.faithful:.0%}"
            for m in first
            if m.right is not None and m.faithful is not None
        )
        lines.append(
            "Models (task, seed, share of right answers when sampled / share of answers that repeat the model's own results; "
            f"seeds below {FAITHFUL:.0%} of these were skipped): {models}."
        )
        lines.append(
            "Recall: share of the known causal tokens (results of steps) among as many top scores. In chain, lookup and "
            "tracking only the last step's are in reach of the answer once it is teacher-forced: no such score reaches 1."
        )
    for measured in result.measured:
        for name, reason in measured.failed.items():
            lines.append(f"LEFT OUT: {name} on {measured.task}, seed {measured.seed}, {measured.dtype}: {reason}")
    return lines


# ---- tables

Cells = list[list[str]]

_PIPE = r"\|"
"""What stands for `|` within a cell of a Markdown table."""


@dataclass(frozen=True)
class Grid:
    """A table, for any medium."""

    title: str
    head: list[str]
    cells: Cells

    @property
    def rows(self) -> Cells:
        """With the head."""
        return [self.head, *self.cells]


def grids(summary: Summary) -> list[Grid]:
    """All tables; the first is the one that matters."""
    found = [_main(summary)]
    if len(summary.tasks) > 1:
        found.append(_by_task(summary, "overlap", "Overlap of the top 20 % with exact OAR-P, by task"))
        if summary.knows_causes:
            found.append(_by_task(summary, "recall", "Recall of causal tokens, by task"))
    if summary.knows_right:
        found.append(_right_and_wrong(summary))
    if len({measured.seed for measured in summary.result.measured}) > 1:
        found.append(_by_model(summary))
    return found


def _main(summary: Summary) -> Grid:
    causes = summary.knows_causes
    head = ["estimator", "Spearman", "top 20 %", f"less {BASELINE}"]
    head += (["causal recall"] if causes else []) + ["deletion", "forward", "backward", "time"]
    others = {dtype: {row.name: row for row in summary.rows(dtype)} for dtype in summary.dtypes[1:]}
    head += [f"top 20 %, {dtype}" for dtype in others]
    cells = []
    for row in sorted(summary.main, key=lambda row: -row.means["overlap"].value):
        gain = row.gain
        line = [
            row.name,
            f"{row.means['spearman'].value:.2f}",
            row.means["overlap"].text,
            "" if row.name == BASELINE else f"{gain.value:+.2f} ± {(gain.high - gain.low) / 2:.2f}",
        ]
        line += [row.means["recall"].text] if causes else []
        deletion = row.means["area"].value
        line += ["" if math.isnan(deletion) else f"{deletion:.2f}"]
        line += [f"{row.forward:.1f}", f"{row.backward:.1f}", f"{row.seconds:.1f}"]
        line += [rows[row.name].means["overlap"].text if row.name in rows else "" for rows in others.values()]
        cells.append(line)
    return Grid(f"Estimators against exact OAR-P ({summary.dtypes[0]})", head, cells)


def _by(summary: Summary, metric: str, title: str, parts: dict[str, Chosen]) -> Grid:
    columns = [{row.name: row for row in summary.rows(summary.dtypes[0], part)} for part in parts.values()]
    return Grid(
        title,
        ["estimator", *parts],
        [[row.name, *(column[row.name].means[metric].text for column in columns)] for row in summary.main],
    )


def _by_task(summary: Summary, metric: str, title: str) -> Grid:
    def part(task: str) -> Chosen:
        return lambda measured, index: measured.task == task

    return _by(summary, metric, title, {task: part(task) for task in summary.tasks})


def _by_model(summary: Summary) -> Grid:
    """Seeds that did not learn their task were skipped, so models are counted within their task."""
    places: dict[tuple[str, int], int] = {}
    for measured in summary.result.measured:
        key = measured.task, measured.seed
        places.setdefault(key, sum(task == measured.task for task, _ in places))

    def part(place: int) -> Chosen:
        return lambda measured, index: places[measured.task, measured.seed] == place

    parts = {f"{place + 1}. model": part(place) for place in range(max(places.values()) + 1)}
    return _by(summary, "overlap", "Overlap of the top 20 %, by model", parts)


def _right_and_wrong(summary: Summary) -> Grid:
    def part(wanted: bool) -> Chosen:
        return lambda measured, index: measured.correct[index] is wanted

    halves = {text: part(wanted) for text, wanted in (("right", True), ("wrong", False))}
    overlap = _by(summary, "overlap", "", halves)
    head = ["estimator", "overlap, right answers", "overlap, wrong answers"]
    cells = overlap.cells
    if summary.knows_causes:
        head += ["recall, right answers", "recall, wrong answers"]
        recall = _by(summary, "recall", "", halves)
        cells = [[*a, *b[1:]] for a, b in zip(cells, recall.cells, strict=True)]
    return Grid("Right and wrong answers apart", head, cells)


def tables(summary: Summary) -> list[Table]:
    """For the terminal: the main table, and right and wrong answers apart."""
    found = []
    for grid in grids(summary)[:1] + ([_right_and_wrong(summary)] if summary.knows_right else []):
        table = Table(title=grid.title)
        for number, name in enumerate(grid.head):
            table.add_column(name, justify="right" if number else "left", no_wrap=not number)
        for line in grid.cells:
            table.add_row(*line)
        found.append(table)
    return found


def markdown(summary: Summary, plot: str | None, command: str) -> str:
    """The report as a page."""
    lines = ["# Fidelity of importance estimators", "", machine_line(summary.result.machine), "", f"`{command}`", ""]
    lines += [f"- {line}" for line in verdicts(summary)] + [""]
    if plot:
        lines += [f"![overlap against cost, and deletion curves]({plot})", ""]
    for grid in grids(summary):
        head, *body = (f"| {' | '.join(cell.replace('|', _PIPE) for cell in line)} |" for line in grid.rows)
        lines += [f"## {grid.title}", "", head, "|---" * len(grid.head) + "|", *body, ""]
    lines += ["## How to read this", "", *(f"- {note}" for note in notes(summary)), "", "## Estimators", ""]
    lines += [f"- `{estimator.name}`: {estimator.about}" for estimator in summary.result.estimators] + [""]
    return "\n".join(lines)


def to_json(summary: Summary, command: str) -> str:
    """Everything that was measured; NaN as null."""
    result = summary.result

    def measured(m: Measured) -> dict[str, Any]:
        judged = {name: _columns(rows) for name, rows in m.judged.items()}
        return {**asdict(m), "judged": judged}

    content = {
        "command": command,
        "settings": asdict(result.settings),
        "machine": result.machine,
        "seconds": result.seconds,
        "estimators": {estimator.name: estimator.about for estimator in result.estimators},
        "verdicts": verdicts(summary),
        "summary": {dtype: [asdict(row) for row in summary.rows(dtype)] for dtype in summary.dtypes},
        "measured": [measured(m) for m in result.measured],
        "notes": notes(summary),
    }
    return json.dumps(_rounded(content), default=str)


def _columns(rows: Sequence[Judged]) -> dict[str, list[float]]:
    return {metric: [getattr(row, metric) for row in rows] for metric in METRICS}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


# ---- plots


def shown_estimators(summary: Summary, extra: int = 2) -> list[str]:
    """Names that plots of curves and examples show: the usual ones and the best of `--also`."""
    estimators = {estimator.name: estimator for estimator in summary.result.estimators}
    added = [row for row in summary.main if estimators[row.name].added]
    added.sort(key=lambda row: -row.means["overlap"].value)
    return [row.name for row in summary.main if estimators[row.name].shown] + [row.name for row in added[:extra]]


def draw(path: Path, summary: Summary) -> bool:
    """Overlap against cost, and deletion curves. False where matplotlib is missing."""
    plt = pyplot()
    if plt is None:
        return False

    figure, (cost, curve) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for goal in GOALS:
        cost.plot([0.5, goal.passes, goal.passes], [goal.overlap, goal.overlap, 1.02], color="#e45756", ls="--", lw=1)
    added = {estimator.name for estimator in summary.result.estimators if estimator.added}
    best = shown_estimators(summary, extra=6)
    for row in summary.main:
        if row.name == REFERENCE or row.passes == 0:
            continue
        mean = row.means["overlap"]
        colour = "#f58518" if row.name in added else "#4c78a8"
        cost.errorbar(
            row.passes, mean.value, [[mean.value - mean.low], [mean.high - mean.value]], fmt="o", color=colour
        )
        if row.name not in added or row.name in best:
            cost.annotate(row.name, (row.passes, mean.value), xytext=(4, 3), textcoords="offset points", fontsize=7)
    cost.set(xscale="log", xlabel="passes, forward and backward", ylabel="overlap of the top 20 % with exact OAR-P")
    cost.set_title("dashed: targets; orange: given with --also, the best named", fontsize=9)
    sources = [m for m in summary.result.measured if m.dtype == summary.dtypes[0] and m.curves]
    for name in shown_estimators(summary) if sources else []:
        points = [statistics.fmean(column) for column in zip(*(m.curves[name] for m in sources), strict=True)]
        curve.plot([100 * share for share in DELETED], points, "o-", label=name, markersize=3)
    curve.set(
        xlabel="% of the reasoning tokens replaced, largest scores first", ylabel="answer's probability, untouched = 1"
    )
    if sources:
        curve.legend(frameon=False, fontsize=8)
    for axes in (cost, curve):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
