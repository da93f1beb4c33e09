"""The study's tables, notes and picture."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.fidelity.tables import plus_minus
from benchmarks.labels import analysis
from benchmarks.labels.analysis import AGAIN, COMPUTED, KINDS, POOL, POSITION, SHOWN, UNITS, Long, Scored, of_responses
from benchmarks.language import smollm2
from benchmarks.report import COLOURS, Progress, Report, Table, subplots

DISTANCES = [0, 64, 128, 256, 512, 1024]
PLAIN = "beyond position, mean without the separator"
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
    "Long texts were written by other models, and read by this one after their question; masked copies with `pad`. Ten units "
    "of each size begin at the same tokens. Error: difference of a unit's scores in bfloat16 and float32, on a CPU (the "
    "forward without replacements whole, copies behind its cache, or whole copies); a GPU rounds otherwise. Order kept: rank "
    "correlation within a text. The two largest: of a text's ten units, in float32. Predictions: of each unit's first "
    "token, by regressions on the ten labels of each text in the other nine tenths; against scores in float32 of these tokens, "
    "or of the longest units that begin with them. These intervals leave out that other labels would give other regressions.",
)  # fmt: skip


def report_on(
    judged: Sequence[Scored], pool: Sequence[Scored], long: Sequence[Long], settings: dict[str, Any], progress: Progress
) -> Report:
    agreed, fitted = analysis.agreements(judged), analysis.predictions(pool, judged, progress)
    spans, predicted = analysis.rounded(long), analysis.long_predictions(long)
    labels = sum(int(row.scores["pad"].isfinite().sum()) for row in pool)
    asked = [len(settings["tasks"]) * settings[part] for part in ("judged", "pool")]
    counts = (
        f"Judged: {len(judged)} of {asked[0]} responses that were asked for, with "
        f"{sum(len(row.scores['pad']) for row in judged):,} reasoning tokens; nothing is fitted on them. Fitted on: up to "
        f"{labels:,} labels of {len(pool)} of {asked[1]} other responses. Each is to its own problem, sampled at temperature "
        f"0.7 after few-shot examples. Long texts: {len(long)} of at most {settings['long']}. `--collect` with nothing makes "
        "the page of what there is."
    )
    name = Path(settings["model"]).name
    means = fitted.groupby(["target", "layer", "units", "wanted"]).mean().reset_index()
    of_texts = predicted.groupby(["kind", "span", "response"], sort=False).mean().reset_index()
    frames = {"agreements": agreed, "labels": means, "spans": spans, "texts": of_texts}
    runs = {key: rows.round(5).astype(object).where(rows.notna(), None).to_dict("list") for key, rows in frames.items()}
    tables = [replacements(agreed), pairs(agreed), by_rule(agreed, fitted), *curves(fitted), details(fitted)]
    return Report(
        title=f"Labels of predicted OAR-P on {name}",
        stem=f"labels_{name}_cpu",
        tables=[*tables, by_distance(spans), by_unit(spans), by_labelled_unit(predicted)],
        notes=[counts, *NOTES, *[smollm2.SOURCE] * (name == smollm2.NAME)],
        runs={"settings": settings, **runs},
        figure=partial(draw, agreed, fitted, spans),
    )


def cells(rows: pd.DataFrame, *values: str) -> list[str]:
    return [plus_minus(of_responses(rows, value)) for value in values]


def replacements(agreed: pd.DataFrame) -> Table:
    lines, but_own = [], ~agreed["but"].isin(POOL) | agreed["name"].str.startswith(POOL)
    for name, rows in agreed[but_own].groupby("name", sort=False):
        line = [str(name), *cells(rows, "overlap", "spearman", "beyond", "no separator", POSITION)]
        line.append(plus_minus(of_responses(rows, f"with {AGAIN}")) if name == "batch" else "")
        lines.append([*line, "" if name in (COMPUTED, POSITION) else f"{rows['mean'].mean():.3f}"])
    columns = "score", "top 20 %", "Spearman", "beyond position", PLAIN, "top 20 % of position"
    title = "What stands in the masked place, against the mean of the other kinds"
    return Table(title, [*columns, "of a second draw", "mean score"], lines)


def pairs(agreed: pd.DataFrame) -> Table:
    lines = [
        [str(name), *(f"{rows[f'with {other}'].mean():.2f}" if name != other else "" for other in KINDS)]
        for name, rows in agreed.groupby("name", sort=False)
    ]
    return Table("Overlap of the top 20 %, of two", ["score", *KINDS], lines)


def by_rule(agreed: pd.DataFrame, fitted: pd.DataFrame) -> Table:
    """Regressions with the most labels."""
    lines = []
    for target in POOL:
        beside = agreed[agreed["but"] == target].set_index("response")
        for layer, units in (*(("last", units) for units in UNITS[2:]), ("middle", SHOWN)):
            rows = fitted[(fitted[["target", "layer", "units"]] == [target, layer, units or 0]).all(axis=1)]
            most = rows[rows["wanted"] == rows["wanted"].max()]
            mine = most.groupby("response").mean(numeric_only=True).reset_index()
            computed = mine["response"].map(beside[beside["name"] == COMPUTED]["beyond"])
            values = cells(mine, "others overlap", "others beyond", "others no separator")
            name = f"predicted, {layer} layer: {mine['labels'].mean():,.0f} labels, {units or 'all'} of a response"
            gain = plus_minus(of_responses(mine.assign(gain=mine["others beyond"] - computed), "gain"), "+")
            lines.append([name, target, *values, gain])
        for name in (COMPUTED, POSITION):
            rows = beside[beside["name"] == name].reset_index()
            lines.append([name, f"not {target}", *cells(rows, "overlap", "beyond", "no separator"), ""])
    columns = "credit", "fitted with", "top 20 %", "beyond position", PLAIN, "beyond position, minus `fisher`"
    return Table("Against the mean of the kinds that nothing was fitted with", columns, lines)


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
        sizes = [f"{rows[column].median():.1e}" for column in ("score", "error", "whole")]
        of = f"{span}", f"{far.left + 1} to {far.right}", f"{len(rows)}"
        lines.append([*of, *sizes, f"{rows['drowned'].mean():.0%}"])
    columns = "tokens of a unit", "to the answer", "units", "median score", "median error", "whole copies"
    title = "Units of long texts: scores in float32, and their error in bfloat16"
    return Table(title, [*columns, "off by more than half"], lines)


def by_unit(spans: pd.DataFrame) -> Table:
    lines = []
    for span, rows in spans.groupby("span"):
        order = rows.groupby("text")[["score", "narrow"]].apply(lambda one: one.rank().corr().iloc[0, 1])
        kept = plus_minus(of_responses(pd.DataFrame({"response": order.index, "kept": order}), "kept"))
        error = rows[rows["distance"] > DISTANCES[-3]]["error"].median()
        largest = rows[rows.groupby("text")["score"].rank(ascending=False) <= 2]
        off = (f"{some['drowned'].mean():.0%}" for some in (rows, largest))
        lines.append([f"{span}", kept, *off, f"{error:.1e}"])
    columns = "tokens of a unit", "order kept", "off by more than half", "of the two largest"
    return Table("By unit, all distances", [*columns, f"median error beyond {DISTANCES[-3]}"], lines)


def by_labelled_unit(predicted: pd.DataFrame) -> Table:
    lines = []
    for (kind, span), rows in predicted.groupby(["kind", "span"], sort=False):
        lines.append([str(kind), f"{span or ''}", *cells(rows, "single", "longest", "beyond", "control")])
    columns = "labels", "tokens of a unit", "Spearman, single tokens", f"Spearman, units of {predicted['span'].max()}"
    title = "Predictions in long texts, fitted with units of other long texts"
    return Table(title, [*columns, "single tokens, beyond position", "without hidden states"], lines)


def draw(agreed: pd.DataFrame, fitted: pd.DataFrame, spans: pd.DataFrame) -> Figure:
    figure, (left, middle, right) = subplots(1, 3, figsize=(12, 4))
    for colour, units in zip(COLOURS, UNITS, strict=False):
        rows = fitted[(fitted["units"] == (units or 0)) & (fitted["layer"] == "last")]
        for target, style in zip(POOL, ("o-", "^--", "s:"), strict=True):
            means = rows[rows["target"] == target].groupby("wanted")[["overlap", "others beyond"]].mean()
            count = f"{units or 'all'} units of a response" if target == POOL[0] else None
            left.plot(means.index, means["overlap"], style, color=colour, label=count)
            middle.plot(means.index, means["others beyond"], style, color=colour, label=None if units else target)
    computed = agreed[agreed["name"] == COMPUTED]["beyond"].mean()
    middle.axhline(computed, color=COLOURS[-1], linestyle="--", label=COMPUTED)
    for colour, (span, rows) in zip(COLOURS, spans.groupby("span"), strict=False):
        interval = pd.cut(rows["distance"], DISTANCES)
        means = rows.groupby(interval, observed=True)[["distance", "score", "error"]].median()
        right.loglog(means["distance"], means["score"], "o-", color=colour, label=f"units of {span}")
        right.loglog(means["distance"], means["error"], ":", color=colour)
    of_labels: dict[str, Any] = {"xscale": "log", "xlabel": "labels", "xticks": sorted(fitted["wanted"].unique())}
    left.set(ylabel="top 20 %, same replacement", **of_labels)
    middle.set(ylabel="beyond position, other kinds", **of_labels)
    right.set(xlabel="tokens to the answer", xticks=DISTANCES[1:-1], ylabel="median score; dotted: error of bfloat16")
    for panel in (left, middle, right):
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.minorticks_off()
        panel.legend(fontsize=6)
    return figure
