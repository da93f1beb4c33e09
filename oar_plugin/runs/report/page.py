"""Writes a page about runs: charts over steps and seconds, differences between two sides, and faults.

uPlot (uplot/) draws the charts in the browser. report.js averages the runs of a side there, because the reader switches runs
on and off and smooths them; this file gives it each run's values.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from scipy import stats

from oar_plugin.output import printable, write_whole
from oar_plugin.page.templates import TEMPLATES
from oar_plugin.runs.report.logs import ENTROPY, REWARD, SECONDS, RunLog, findings

LINES = (
    ("Reward", REWARD, "Mean over a step's responses."),
    ("Entropy", ENTROPY, "Entropy of the policy, in nats per token."),
    ("Response length", ("response_length/mean",), "Mean, in tokens."),
    ("Gradient norm", ("actor/grad_norm",), "Before clipping."),
    ("Answer found", ("oar/answer_found",), "Share of the responses in which OAR found a final answer."),
    ("ESS ratio", ("oar/ess_ratio",), "1: all tokens have the same credit. Near 0: few tokens have all of it."),
    ("Top-10 % mass", ("oar/top10_mass",), "Share of the weight on the top 10 % of the tokens; 0.1: all are equal."),
    ("Seconds of OAR", ("timing_s/oar",), "Added to a step; the phases below include it. Without the first step."),
)
ACCURACY = "Mean over the validation problems. Their number is not logged, so only the spread over seeds is shown."
STACKS = (
    ("Fallbacks", "oar/fallback/", "oar/fallback/any", "Shares of the responses that fell back to GRPO, by reason."),
    (
        "Seconds by phase",
        "timing_s/",
        SECONDS,
        "Seconds per step, without the first. verl's v1 trainers validate (testing) and dump rollouts after the timed step.",
    ),
)
OUTSIDE = ["timing_s/testing", "timing_s/dump_rollout_generations"]  # phases that are not part of `SECONDS`
PARTS = 7  # maximum number of stacked parts, each with a colour in report.css
REST = 0.01  # smallest share that is shown as "other"; less is rounding
POINTS = 250  # maximum per line: more cannot be told apart in a chart's width
HERE = Path(__file__).parent
FILES = {
    "chart_style": "uplot/uPlot.min.css",
    "chart_script": "uplot/uPlot.iife.min.js",
    "chart_license": "uplot/LICENSE",
    "style": "report.css",
    "script": "report.js",
}

Table = list[list[str]]  # the first row has the column titles


@dataclass(frozen=True, eq=False)
class Side:
    """Runs that differ only in their seeds. The name must be printable: pandas refuses lone surrogates."""

    name: str
    runs: Sequence[RunLog]

    def seconds(self) -> pd.Series:
        """Return step -> seconds since the end of the first step, which includes start-up; empty if no run logged them.

        The duration of a step is its mean over the runs that logged it.
        """
        steps = pd.concat([run.seconds() for run in self.runs], axis=1).sort_index().mean(axis=1)
        known = steps.dropna()
        return (steps.fillna(0.0).cumsum() - known.iloc[0]).clip(lower=0.0) if len(known) else known


@dataclass(frozen=True)
class Chart:
    """One metric of all runs: a line per run, or parts that are stacked.

    `frames` has a frame per run, in the order of the sides. A frame has a row per step, and a column per part; a line has one
    part. It has no rows if the run did not log the metric.
    """

    title: str
    note: str
    frames: Sequence[pd.DataFrame]
    stacked: bool

    def data(self) -> dict[str, Any]:
        """Return what report.js draws: means of consecutive steps, at the last of them, of each part of each run."""
        joined = pd.concat(self.frames, axis=1, keys=range(len(self.frames))).sort_index()
        group = np.arange(len(joined)) // math.ceil(len(joined) / POINTS)
        last = np.append(group[1:] != group[:-1], True)
        means = joined.groupby(group).mean()
        runs = [[_rounded(column) for _, column in means[run].items()] for run in range(len(self.frames))]
        parts = [printable(part) for part in self.frames[0]]
        texts = {"title": printable(self.title), "parts": parts, "stacked": self.stacked}
        return {**texts, "steps": joined.index[last].tolist(), "runs": runs}


def _rounded(column: pd.Series) -> list[float | None]:
    short = (float(f"{x:.4g}") for x in column)
    return [x if math.isfinite(x) else None for x in short]


def charts(sides: Sequence[Side]) -> list[Chart]:
    """Return the charts for which a run has data."""
    runs = [run for side in sides for run in side.runs]
    accuracies = [(f"Accuracy: {name.removeprefix('val-core/')}", (name,), ACCURACY) for name in _accuracies(sides)]
    lines = (LINES[0], *accuracies, *LINES[1:])
    drawn = [Chart(title, note, [_line(run, names) for run in runs], False) for title, names, note in lines]
    drawn += [Chart(title, note, _parts(runs, prefix, whole), True) for title, prefix, whole, note in STACKS]
    return [chart for chart in drawn if any(frame.size for frame in chart.frames)]


def _accuracies(sides: Sequence[Side]) -> list[str]:
    logged = {name for side in sides for run in side.runs for name in run.metrics}
    return sorted(name for name in logged if name.startswith("val-core/") and "/mean@" in name)


def _line(run: RunLog, names: Sequence[str]) -> pd.DataFrame:
    """Return a metric as a frame. Seconds are without the first step: it includes start-up, and would flatten the chart."""
    column = run.column(*names)
    return (column.iloc[1:] if names[0].startswith("timing_s/") else column).to_frame("value")


def _parts(runs: Sequence[RunLog], prefix: str, whole: str) -> list[pd.DataFrame]:
    """Return each run's metrics with a prefix: the largest of all runs, and `other`, the rest of the metric `whole`."""
    frames = []
    for run in runs:
        total = _line(run, (whole,))["value"]
        # OAR's seconds are left out: other phases contain them.
        parts = run.metrics.loc[total.index].filter(regex=f"^{prefix}(?!oar|any$|step$)[^/]+$")
        parts = parts.where(lambda x: x < math.inf).fillna(0.0)
        inside = parts.drop(columns=OUTSIDE, errors="ignore").sum(axis=1)
        parts = parts.rename(columns=lambda name: name.removeprefix(prefix))
        frames.append(parts.assign(other=(total - inside).clip(lower=0.0)))
    sums = pd.concat(frames).drop(columns="other").sum()
    kept = sums[sums > 0].nlargest(PARTS - 1).index
    shown = [frame.reindex(columns=kept, fill_value=0.0) for frame in frames]
    rest = [frame.sum(axis=1) - part.sum(axis=1) for frame, part in zip(frames, shown, strict=True)]
    if sum(x.sum() for x in rest) > REST * sums[kept].sum() > 0:
        shown = [part.assign(other=x) for part, x in zip(shown, rest, strict=True)]
    return shown


def comparison(sides: Sequence[Side]) -> Table:
    """Return a row per quantity: each side's mean and range over its runs, and the first side minus the second.

    Only steps that all runs have reached count. Final: the mean of the last tenth of the steps. Best: the highest mean
    of any consecutive tenth of the steps.
    """
    until = min(run.metrics.index[-1] for side in sides for run in side.runs)
    measured = [("reward", REWARD), *((name.removeprefix("val-core/"), (name,)) for name in _accuracies(sides))]
    asked = [(f"{what}, {how}", names, summary) for what, names in measured for how, summary in SUMMARIES.items()]
    table = [["", *(side.name for side in sides), *["difference, 95 % interval"] * (len(sides) > 1)]]
    for quantity, names, summary in [*asked, ("seconds per step, median", (SECONDS,), pd.Series.median)]:
        logged = [[(run.seed, run.column(*names).loc[:until]) for run in side.runs] for side in sides]
        values = [[(seed, summary(column)) for seed, column in runs if len(column)] for runs in logged]
        if any(values):
            table.append([quantity, *map(_range, values), *([_difference(*values)] if len(sides) > 1 else [])])
    return table


def _windows(column: pd.Series) -> pd.Series:
    return column.rolling(max(1, len(column) // 10)).mean()


SUMMARIES: dict[str, Callable[[pd.Series], float]] = {
    "final": lambda column: _windows(column).iloc[-1],
    "mean": pd.Series.mean,
    "best": lambda column: _windows(column).max(),
}

Measured = Sequence[tuple[int | None, float]]  # (seed, value) of each run


def _range(runs: Measured) -> str:
    values = pd.Series([value for _, value in runs])
    spread = f" ({values.min():.3f} to {values.max():.3f})" if len(values) > 1 else ""
    return f"{values.mean():.3f}{spread}" if runs else ""


def _difference(runs: Measured, baseline: Measured) -> str:
    """Return the difference and its 95 % interval: paired if both sides have the same seeds, each once; else Welch's."""
    ours, theirs = ([value for _, value in side] for side in (runs, baseline))
    if not (ours and theirs):
        return ""
    mean = np.mean(ours) - np.mean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return f"{mean:+.3f}, one run: no interval"
    own, other = dict(runs), dict(baseline)  # by seed
    paired = own.keys() == other.keys() and None not in own and len(own) == len(ours) == len(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns if all runs of a side are equal
        if paired:
            test = stats.ttest_rel(ours, [other[seed] for seed in own])
        else:
            test = stats.ttest_ind(ours, theirs, equal_var=False)
        low, high = test.confidence_interval()
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}], {'paired' if paired else 'unpaired'}"


def labelled(sides: Sequence[Side]) -> list[tuple[str, RunLog]]:
    """Return (label, run) of all runs; numbers make the labels unique, because folders can have the same name."""
    return [(f"{side.name} {number}: {run.name}", run) for side in sides for number, run in enumerate(side.runs, 1)]


def config_differences(sides: Sequence[Side]) -> Table:
    """Return the settings, except seeds, that differ between runs; runs without known settings are left out."""
    runs = [(label, run.settings) for label, run in labelled(sides) if run.settings]
    keys = sorted({key for _, settings in runs for key in settings if not key.endswith("seed")})
    rows = [[key, *(str(settings.get(key, "")) for _, settings in runs)] for key in keys]
    return [["", *(label for label, _ in runs)], *(row for row in rows if len({*row[1:]}) > 1)]


class Report(NamedTuple):
    page: Path
    comparison: Table
    findings: Table


def write_report(sides: Sequence[Side], folder: Path) -> Report:
    """Write `report.html`, which needs no other file and no network."""
    shown, runs = charts(sides), labelled(sides)
    wrong = [["run", "step", "what"], *([label, *row] for label, run in runs for row in findings(run))]
    report = Report(folder / "report.html", comparison(sides), wrong)
    templates = TEMPLATES.overlay(loader=jinja2.FileSystemLoader(HERE))
    page = templates.get_template("report.html.j2").render(
        **report._asdict(),
        **{name: Markup((HERE / file).read_text("utf-8")) for name, file in FILES.items()},  # noqa: S704  our own
        data=htmlsafe_json_dumps(_data(sides, shown), separators=(",", ":"), allow_nan=False),
        **{"sides": sides, "runs": runs, "settings": config_differences(sides), "charts": shown, "points": POINTS},
    )
    write_whole(report.page, page)
    return report


def _data(sides: Sequence[Side], shown: Sequence[Chart]) -> dict[str, Any]:
    """Return what report.js draws. A side's `seconds` belong to `steps`, all at which a chart has a point."""
    drawn = [chart.data() for chart in shown]
    steps = sorted({step for chart in drawn for step in chart["steps"]})
    known = []
    for side in sides:
        seconds = [None if math.isnan(x) else round(x, 1) for x in side.seconds().reindex(steps)]
        known.append({"name": side.name, "runs": len(side.runs), "seconds": seconds})
    return {"charts": drawn, "sides": known, "steps": steps}
