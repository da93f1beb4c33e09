"""Writes a page about runs: curves over steps and seconds, differences between two sides, and faults."""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
from scipy import stats

from oar_plugin.output import write_whole
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
    ("Seconds of OAR", ("timing_s/oar",), "Added by OAR to a step; the phases below include it."),
)
ACCURACY = "Mean over the validation problems. Their number is not logged, so only the spread over seeds is shown."
STACKS = (
    ("Fallbacks", "oar/fallback/", "oar/fallback/any", "Shares of the responses that fell back to GRPO, by reason."),
    (
        "Seconds by phase",
        "timing_s/",
        SECONDS,
        "Seconds per step. verl's v1 trainers validate (testing) and dump rollouts after the timed step.",
    ),
)
OUTSIDE = ["timing_s/testing", "timing_s/dump_rollout_generations"]  # phases that are not part of `SECONDS`
# Okabe and Ito's palette. STYLES: colour and line of each side; PARTS: colours of stacked parts.
STYLES = (("#0072B2", "-"), ("#D55E00", "--"))
PARTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
INK = "#010203"  # placeholder in SVG pictures; the page replaces it by its text colour
LOOK: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **{"svg.fonttype": "none", "font.size": 9, "grid.alpha": 0.3, "legend.frameon": False, "axes.grid": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False},
}
REST = 0.01  # smallest share that is shown as "other"; less is rounding
LONGEST_STEM = 60  # characters of a file name, at most four bytes each; file systems allow 255 bytes
POINTS = 150  # maximum per line, each the mean of consecutive steps; tables show every n-th step

Table = list[list[str]]  # the first row has the column titles


@dataclass(frozen=True, eq=False)
class Side:
    """Runs that differ only in their seeds. The name must be printable: pandas refuses lone surrogates."""

    name: str
    runs: Sequence[RunLog]

    def seconds(self) -> pd.Series:
        """Return step -> seconds since the start. The duration of a step is its mean over the runs that logged it."""
        return pd.concat([run.seconds() for run in self.runs], axis=1).sort_index().mean(axis=1).fillna(0.0).cumsum()


@dataclass(frozen=True)
class Panel:
    """One figure.

    A side's frame has a row per step. Its columns are `mean`, `lowest` and `highest` over runs, or the parts of a stack.
    """

    title: str
    note: str
    frames: Mapping[Side, pd.DataFrame]
    stacked: bool

    @property
    def table(self) -> Table:
        frames = [frame.add_prefix(f"{side.name} ") for side, frame in self.frames.items()]
        joined = pd.concat(frames, axis=1).sort_index()
        shown = joined.iloc[:: math.ceil(len(joined) / POINTS)]
        lines = ([str(step), *("" if math.isnan(x) else f"{x:.4g}" for x in row)] for step, *row in shown.itertuples())
        return [["step", *joined], *lines]


def panels(sides: Sequence[Side]) -> Iterator[Panel]:
    """Yield the panels for which a side has data."""
    accuracies = [(f"Accuracy: {name.removeprefix('val-core/')}", (name,), ACCURACY) for name in _accuracies(sides)]
    lines = (LINES[0], *accuracies, *LINES[1:])
    drawn = [(title, note, False, [_line(side, names) for side in sides]) for title, names, note in lines]
    drawn += [(title, note, True, [_parts(side, *of) for side in sides]) for title, *of, note in STACKS]
    for title, note, stacked, frames in drawn:
        if logged := {side: frame for side, frame in zip(sides, frames, strict=True) if frame.size}:
            yield Panel(title, note, logged, stacked)


def _accuracies(sides: Sequence[Side]) -> list[str]:
    logged = {name for side in sides for run in side.runs for name in run.metrics}
    return sorted(name for name in logged if name.startswith("val-core/") and "/mean@" in name)


def _line(side: Side, names: Sequence[str]) -> pd.DataFrame:
    """Return mean and range over runs at the steps that all of them logged; runs without these metrics are ignored."""
    columns = [column for run in side.runs if len(column := run.column(*names))]
    rows = pd.concat(columns, axis=1, join="inner") if columns else pd.DataFrame()
    spread = {"lowest": rows.min(axis=1), "highest": rows.max(axis=1)} if len(columns) > 1 else {}
    return pd.DataFrame({"mean": rows.mean(axis=1), **spread})


def _parts(side: Side, prefix: str, whole: str) -> pd.DataFrame:
    """Return the largest metrics with a prefix, and `other`, the rest of the metric `whole`; means over the runs."""
    frames = []
    for run in side.runs:
        total = run.column(whole)
        # OAR's seconds are left out: other phases contain them.
        parts = run.metrics.loc[total.index].filter(regex=f"^{prefix}(?!oar|any$|step$)[^/]+$")
        parts = parts.where(lambda x: x < math.inf).fillna(0.0)
        inside = parts.drop(columns=OUTSIDE, errors="ignore").sum(axis=1)
        frames.append(parts.assign(other=(total - inside).clip(lower=0.0)))
    mean = pd.concat(frames).fillna(0.0).groupby(level=0).mean().rename(columns=lambda name: name.removeprefix(prefix))
    largest = mean.drop(columns="other").sum().nlargest(len(PARTS) - 1)
    kept = mean[largest[largest > 0].index]
    rest = mean.sum(axis=1) - kept.sum(axis=1)
    return kept.assign(other=rest) if rest.sum() > REST * kept.sum().sum() > 0 else kept


# ---- differences between the sides


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


# ---- pictures and page


class Report(NamedTuple):
    """The path of the written page, and two of its tables."""

    page: Path
    comparison: Table
    findings: Table


def write_report(
    sides: Sequence[Side], folder: Path, progress: Callable[[str, int, int], None] = lambda *_: None
) -> Report:
    """Write a self-contained `report.html` and two PNG files per figure. ModuleNotFoundError: matplotlib is missing."""
    shown, figures = list(panels(sides)), []
    for place, panel in enumerate(shown):
        progress(panel.title, place, len(shown))
        stem = re.sub(r"\W+", "_", panel.title.lower())
        if len(stem) > LONGEST_STEM:
            stem = f"{stem[:LONGEST_STEM]}_{place}"  # unique even if titles begin alike
        figures.append((panel, [_picture(panel, of, folder / f"{stem}_{of}.png") for of in ("steps", "seconds")]))
    runs = labelled(sides)
    wrong = [["run", "step", "what"], *([label, *row] for label, run in runs for row in findings(run))]
    report = Report(folder / "report.html", comparison(sides), wrong)
    templates = TEMPLATES.overlay(loader=jinja2.FileSystemLoader(Path(__file__).parent))
    page = templates.get_template("report.html.j2").render(
        **report._asdict(), sides=sides, runs=runs, settings=config_differences(sides), figures=figures, points=POINTS
    )
    write_whole(report.page, page)
    return report


def _picture(panel: Panel, against: str, file: Path) -> str:
    """Write a figure as a PNG file, and return it as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(LOOK):
        rows = len(panel.frames) if panel.stacked else 1
        figure = Figure(figsize=(5, 1.4 + 1.6 * rows), layout="constrained")
        plots = figure.subplots(rows, sharex=True, sharey=True, squeeze=False)[:, 0]
        for place, (side, frame) in enumerate(panel.frames.items()):
            drawn = frame.assign(x=frame.index if against == "steps" else side.seconds()[frame.index])
            drawn = drawn.groupby(np.arange(len(drawn)) // math.ceil(len(drawn) / POINTS)).mean()
            x, frame = drawn.pop("x"), drawn
            axes, (colour, line) = plots[place if panel.stacked else 0], STYLES[place]
            if panel.stacked:
                axes.stackplot(x, frame.T, labels=[*frame], colors=PARTS)
                axes.set_title(side.name, loc="left")
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
                continue
            axes.plot(x, frame["mean"], line, color=colour, label=side.name, marker="." if len(x) < 12 else None)
            if "lowest" in frame:
                axes.fill_between(x, frame["lowest"], frame["highest"], color=colour, alpha=0.25, lw=0)
            axes.legend()
        plots[-1].set_xlabel("step" if against == "steps" else f"seconds (sum of {SECONDS})")
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=140)
        write_whole(file, png.getvalue())
        figure.savefig(svg, format="svg", transparent=True)
    return "<svg" + svg.getvalue().replace(INK, "currentColor").partition("<svg")[2]
