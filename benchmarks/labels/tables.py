"""The study's tables, notes and picture."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.fidelity.tables import plus_minus
from benchmarks.labels import analysis
from benchmarks.labels.analysis import AGAIN, KINDS, POOL, SHOWN, UNITS, Long, Scored, of_responses
from benchmarks.language import smollm2
from benchmarks.report import COLOURS, Progress, Report, Table, subplots

DISTANCES = [0, 64, 128, 256, 512, 1024]
FAR = (500, 2048, 4096)
"""Tokens before the answer that unit scores are put at by the line through their logarithms."""
NOTES = (
    "Top 20 %: overlap of the 20 % largest scores. Beyond position: correlation of ranks without the best quadratic function "
    "of the position. Other kinds: the mean of exact scores, each over its mean in the response, with what else stands in the "
    "masked place (of two draws first their mean); the kind that is judged, or fitted with, is not among them.",
    "What stands in the masked place: `pad` is the model's padding token, which ends its turns; `separator` stands between "
    "documents; `sampled` is drawn from the model's prediction; `batch` is a reasoning token of any response to the same kind "
    "of task. No draw is the replaced token. Where a fixed token would replace itself, the score is 0.",
    "Judged scores are float32, labels to fit on bfloat16. Of the pool's first responses all units are labelled, of the "
    "others 16. Fitted: ridge regressions of centred log scores on the package's features, centred within each response. "
    "Which responses and units are labelled is drawn eight times; units are spread over a response. Labels are those wanted; "
    "the last response may bring a few more. An empty cell: the pool has no more. Without hidden states: position and doubt.",
    "Intervals (±, half the width at 95 %) are percentile bootstraps over responses of the mean over draws. Variance "
    "explained: of all judged responses' centred log scores.",
    "Long texts were written by other models, and read by this one after their question; masked copies with `pad`. Units of "
    "all sizes begin at the same tokens. Error: difference of a unit's scores in bfloat16 and float32, on a CPU; a GPU rounds "
    "otherwise. Distances beyond the longest text are extrapolated from the line of log score on log distance.",
)  # fmt: skip


def report_on(
    judged: Sequence[Scored], pool: Sequence[Scored], long: Sequence[Long], settings: dict[str, Any], progress: Progress
) -> Report:
    agreed, fitted = analysis.agreements(judged), analysis.predictions(pool, judged, progress)
    spans = analysis.rounded(long)
    labels = sum(int(row.scores["pad"].isfinite().sum()) for row in pool)
    counts = (
        f"Judged: {len(judged)} responses with {sum(len(row.scores['pad']) for row in judged):,} reasoning tokens, on which "
        f"nothing is fitted. Fitted on: up to {labels:,} labels of {len(pool)} other responses. Each is to a problem of its "
        f"own. Long texts: {len(long)}."
    )
    name = Path(settings["model"]).name
    means = (
        fitted.groupby(["target", "layer", "units", "wanted"]).mean().drop(columns=["response", "draw"]).reset_index()
    )
    frames = {"agreements": agreed, "labels": means, "spans": spans}
    runs = {key: rows.round(5).astype(object).where(rows.notna(), None).to_dict("list") for key, rows in frames.items()}
    tables = [replacements(agreed), pairs(agreed), by_rule(agreed, fitted), *curves(fitted), details(fitted)]
    return Report(
        title=f"Labels of predicted OAR-P on {name}",
        stem=f"labels_{name}_cpu",
        tables=[*tables, by_distance(spans), by_unit(spans)],
        notes=[counts, *NOTES, *[smollm2.SOURCE] * (name == smollm2.NAME)],
        runs={"settings": settings, **runs},
        figure=partial(draw, agreed, fitted, spans),
    )


def cells(rows: pd.DataFrame, *values: str) -> list[str]:
    return [plus_minus(of_responses(rows, value)) for value in values]


def replacements(agreed: pd.DataFrame) -> Table:
    lines = []
    for name, rows in agreed[~agreed["but"].isin(POOL) | agreed["name"].str.startswith(POOL)].groupby(
        "name", sort=False
    ):
        again = plus_minus(of_responses(rows, f"with {AGAIN}")) if name == "batch" else ""
        mean = "" if name in ("fisher", "position") else f"{rows['mean'].mean():.3f}"
        lines.append([str(name), *cells(rows, "overlap", "spearman", "beyond", "position"), again, mean])
    columns = (
        "score",
        "top 20 %",
        "Spearman",
        "beyond position",
        "top 20 % of position",
        "of a second draw",
        "mean score",
    )
    return Table("What stands in the masked place, against the mean of the other kinds", columns, lines)


def pairs(agreed: pd.DataFrame) -> Table:
    lines = [
        [str(name), *(f"{rows[f'with {other}'].mean():.2f}" if name != other else "" for other in KINDS)]
        for name, rows in agreed.groupby("name", sort=False)
    ]
    return Table("Overlap of the top 20 %, of two", ["score", *KINDS], lines)


def most(fitted: pd.DataFrame, target: str, units: int) -> pd.DataFrame:
    """The regressions with the most labels."""
    rows = fitted[(fitted["target"] == target) & (fitted["units"] == units) & (fitted["layer"] == "last")]
    return rows[rows["wanted"] == rows["wanted"].max()]


def by_rule(agreed: pd.DataFrame, fitted: pd.DataFrame) -> Table:
    lines = []
    for target in POOL:
        beside = {name: agreed[(agreed["name"] == name) & (agreed["but"] == target)] for name in ("fisher", "position")}
        for units in (SHOWN, 0):
            mine = most(fitted, target, units).groupby(["response", "labels"]).mean(numeric_only=True).reset_index()
            name = (
                f"predicted, fitted with {target}: {mine['labels'].mean():,.0f} labels, {units or 'all'} of a response"
            )
            fisher = mine["response"].map(beside["fisher"].set_index("response")["beyond"])
            gain = plus_minus(of_responses(mine.assign(gain=mine["others beyond"] - fisher), "gain"), "+")
            lines.append([name, f"all but {target}", *cells(mine, "others overlap", "others beyond"), gain])
        for name, rows in beside.items():
            lines.append([name, f"all but {target}", *cells(rows, "overlap", "beyond"), ""])
    columns = "credit", "mean of", "top 20 %", "beyond position", "minus `fisher`"
    return Table("Against replacements that nothing was fitted with", columns, lines)


def curves(fitted: pd.DataFrame) -> Iterator[Table]:
    for target, rows in fitted[fitted["layer"] == "last"].groupby("target", sort=False):
        means = rows.groupby(["units", "wanted"])[["overlap", "beyond", "others beyond"]].mean()
        wanted, lines = sorted(rows["wanted"].unique()), []
        for units in UNITS:
            known = [means.loc[units or 0, n] if (units or 0, n) in means.index else [] for n in wanted]
            lines.append([f"{units or 'all'}", *(" / ".join(f"{x:.2f}" for x in cell) for cell in known)])
        title = f"Fitted with {target}, by labels: top 20 % / beyond position / beyond position of the other kinds"
        yield Table(title, ["units of a response", *(f"{n:,}" for n in wanted)], lines)


def details(fitted: pd.DataFrame) -> Table:
    lines = []
    for (target, layer, wanted), rows in fitted[fitted["units"] == SHOWN].groupby(["target", "layer", "wanted"]):
        explained = [plus_minus(of_responses(rows, error, "variance")) for error in ("error", "control error")]
        values = cells(rows, "overlap", "beyond", "others overlap", "others beyond", "control")
        lines.append([f"{target}, {layer} layer", f"{wanted:,}", *values, *explained])
    columns = "top 20 %", "beyond position", "top 20 %, other kinds", "beyond position, other kinds"
    more = "beyond position, other kinds, without hidden states", "variance explained", "without hidden states"
    return Table(f"{SHOWN} units of each response", ["fitted with", "labels", *columns, *more], lines)


def by_distance(spans: pd.DataFrame) -> Table:
    lines = []
    for (span, far), rows in spans.groupby(["span", pd.cut(spans["distance"], DISTANCES)], observed=True):
        sizes = [f"{rows[column].median():.1e}" for column in ("score", "error")]
        lines.append(
            [f"{span}", f"{far.left + 1} to {far.right}", f"{len(rows)}", *sizes, f"{rows['drowned'].mean():.0%}"]
        )
    columns = "tokens of a unit", "to the answer", "units", "median score", "median error", "off by more than half"
    return Table("Units of long texts: scores in float32, and their error in bfloat16", columns, lines)


def line_of(rows: pd.DataFrame) -> np.ndarray:
    """Slope and height of log score on log distance."""
    kept = rows[rows["score"] > 0]
    return np.polyfit(np.log(kept["distance"]), np.log(kept["score"]), 1)


def by_unit(spans: pd.DataFrame) -> Table:
    lines = []
    for span, rows in spans.groupby("span"):
        order = rows.groupby("text")[["score", "narrow"]].apply(lambda one: one.rank().corr().iloc[0, 1])
        kept = plus_minus(of_responses(order.rename("kept").rename_axis("response").reset_index(), "kept"))
        line = line_of(rows)
        far = [f"{np.exp(np.polyval(line, np.log(distance))):.1e}" for distance in FAR]
        far_off = rows[rows["distance"] > DISTANCES[-3]]["error"].median()
        lines.append([f"{span}", kept, f"{rows['drowned'].mean():.0%}", f"{line[0]:.2f}", *far, f"{far_off:.1e}"])
    columns = "tokens of a unit", "order kept", "off by more than half", "slope", *(f"score at {d:,}" for d in FAR)
    return Table("By unit, all distances", [*columns, f"median error beyond {DISTANCES[-3]}"], lines)


def draw(agreed: pd.DataFrame, fitted: pd.DataFrame, spans: pd.DataFrame) -> Figure:
    figure, (left, middle, right) = subplots(1, 3, figsize=(12, 4))
    for colour, units in zip(COLOURS, UNITS, strict=False):
        rows = fitted[(fitted["units"] == (units or 0)) & (fitted["layer"] == "last")]
        for panel, column, target in ((left, "overlap", "pad"), (middle, "others beyond", "pad")):
            means = rows[rows["target"] == target].groupby("wanted")[column].mean()
            panel.plot(means.index, means, "o-", color=colour, label=f"{units or 'all'} of a response", markersize=4)
    beside = agreed[agreed["but"] == "pad"].groupby("name")["beyond"].mean()
    for name, style in (("fisher", "--"), ("position", ":")):
        middle.axhline(beside[name], color=COLOURS[-1], linestyle=style, label=name)
    for colour, (span, rows) in zip(COLOURS, spans.groupby("span"), strict=False):
        means = rows.groupby(pd.cut(rows["distance"], DISTANCES), observed=True)[
            ["distance", "score", "error"]
        ].median()
        right.loglog(means["distance"], means["score"], "o-", color=colour, label=f"{span} tokens", markersize=4)
        right.loglog(means["distance"], means["error"], ":", color=colour)
    for panel, y in ((left, "top 20 %, same replacement"), (middle, "beyond position, other kinds")):
        panel.set(xscale="log", xlabel="labels, fitted with pad", ylabel=y)
        panel.legend(fontsize=7)
    right.set(xlabel="tokens to the answer", ylabel="median score of a unit; dotted: error of bfloat16")
    right.legend(fontsize=7)
    return figure
