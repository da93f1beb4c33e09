"""The study's tables, and the notes below them."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from benchmarks.fidelity.estimators import REFERENCE, Score, package_estimators
from benchmarks.fidelity.responses import Source
from benchmarks.fidelity.scores import mean_over_groups
from benchmarks.language import smollm2
from benchmarks.report import Table
from benchmarks.statistics import Estimate
from benchmarks.workload import DEFAULT
from oar_plugin.credit.probe import PROBES, Probe

BASELINE = f"{DEFAULT} 1"
"""What others are compared with."""

MAIN, BF16, AGAIN = "float32", "bfloat16", "another seed"
"""Ways to run estimators. Those with another probe have its name."""
DRAWN = (BASELINE, "oar_g 1", "oar_p sampled")
"""What is judged with another seed."""
BY_PROBE = (REFERENCE, BASELINE, "oar_g 1", "position")
"""What is judged under other probes."""

TITLES = {
    "overlap": "Overlap of the top 20 % with exact OAR-P",
    "beyond": "Correlation with exact OAR-P beyond position",
    "recall": "Recall of causal tokens",
}
GROUP = ["task", "length", "model"]

FEWEST = 5
"""Responses that an interval needs; of each kind in a source, where right and wrong ones are compared."""

Rows: TypeAlias = dict[str, list[dict[str, Any]]]
"""What was found on a source: rows of the lists of `Findings`."""


@dataclass
class Findings:
    """What was measured with these estimators.

    `judged` has a row for each source, way, estimator and response, `costs` for each source and estimator, and `scored` for
    each response, with its scores `[R]` by estimator in float32.
    """

    probe: Probe
    part: int
    estimators: dict[str, Score]
    sources: list[dict[str, Any]] = field(default_factory=list)
    judged: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    scored: list[dict[str, Any]] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        for name, of_name in rows.items():
            getattr(self, name).extend(of_name)

    @cached_property
    def added(self) -> set[str]:
        """Names of estimators that the package does not have."""
        return {*self.estimators} - {*package_estimators()}

    @cached_property
    def main(self) -> pd.DataFrame:
        return self.rows(MAIN)

    def rows(self, way: str) -> pd.DataFrame:
        """`judged` of a way."""
        return pd.DataFrame([row for row in self.judged if row["way"] == way])

    @property
    def causal(self) -> bool:
        """Whether it is known which tokens decide the answer."""
        return bool(self.main["recall"].notna().any())

    @cached_property
    def summary(self) -> pd.DataFrame:
        """By estimator, the best first: an `Estimate` of each metric in float32, and costs."""
        metrics = ("spearman", "beyond", "overlap", "gain", "recall")
        groups = self.main.groupby("estimator", sort=False)
        found = {name: {metric: estimate(rows, metric) for metric in metrics} for name, rows in groups}
        costs = pd.DataFrame(self.costs).groupby("estimator")
        passes = costs[["forward", "backward"]].mean()
        passes = passes.assign(passes=passes.sum(axis=1), time=costs["time"].median())
        best_first = sorted(found, key=lambda name: -found[name]["overlap"].value)
        return pd.DataFrame.from_dict(found, orient="index").join(passes).loc[best_first]

    def shown(self) -> list[str]:
        """Names that examples have room for, the best first."""
        return [name for name in self.summary.index if name in own_cost(self.estimators)]

    def examples(self) -> list[dict[str, Any]]:
        """A right and a wrong response of each task; long ones would fill the page."""
        shown: dict[tuple[str, bool], dict[str, Any]] = {}
        for row in self.scored:
            if row["model"] == "model 0" and row["length"] != "long" and len(row["scores"]) == len(self.estimators):
                shown.setdefault((row["task"], row["response"].right), row)
        return [*shown.values()]

    def runs(self) -> dict[str, Any]:
        """For the JSON: means over each source's right and wrong responses, and costs."""
        groups = pd.DataFrame(self.judged).groupby([*GROUP, "way", "estimator", "answer"], sort=False)
        means = groups[["spearman", "beyond", "overlap", "recall", "own"]].mean().round(4)
        means = means.assign(responses=groups.size()).reset_index()
        columns = means.astype(object).where(means.notna(), None).to_dict("list")
        costs = pd.DataFrame(self.costs).round(4).to_dict("list")
        return {"sources": self.sources, "means": columns, "costs": costs}


def own_cost(estimators: dict[str, Score]) -> list[str]:
    """Each importance at its own cost."""
    return list({name.split()[0]: name for name in reversed(estimators)}.values())


def source_row(key: dict[str, Any], source: Source) -> dict[str, Any]:
    """What was sampled."""
    reasoning = sum(len(response.reasoning_R) for response in source.responses) / len(source.responses)
    counts = {"scored": len(source.responses), "left out": source.unusable, "reasoning tokens": reasoning}
    return {**key, **counts, "right": source.right}


def estimate(rows: pd.DataFrame, metric: str) -> Estimate:
    """The mean over sources of a metric."""
    return mean_over_groups([list(values) for _, values in rows.groupby(GROUP, sort=False)[metric]])


def plus_minus(found: Estimate, sign: str = "") -> str:
    """`value ± half the interval's width`; `value (count)` below FEWEST values; empty without data."""
    spread = f"± {(found.high - found.low) / 2:.2f}" if found.count >= FEWEST else f"({found.count})"
    return f"{found.value:{sign}.2f} {spread}" if found.count else ""


def tables_of(findings: Findings) -> list[Table]:
    """The most important first."""
    tables = [_main(findings), _probes(findings), _sampled(findings)]
    for column in ("task", "length", "answer", "model"):
        if findings.main[column].nunique() > 1:
            for metric, title in TITLES.items():
                if metric != "recall" or findings.causal:
                    tables.append(_split(findings, f"{title}, by {column}", column, metric))
    return tables


def _main(findings: Findings) -> Table:
    titles = {f"own top 20 % kept in {BF16}": BF16, f"with {AGAIN}": AGAIN}
    elsewhere = {title: dict(list(findings.rows(way).groupby("estimator"))) for title, way in titles.items()}
    causal = ["causal recall"] * findings.causal
    columns = ["estimator", "Spearman", "beyond position", "top 20 %", f"minus {BASELINE}", "responses", *causal]
    columns += ["forward", "backward", "time", *elsewhere]
    lines = []
    for name, row in findings.summary.iterrows():
        line = [name, f"{row.spearman.value:.2f}", plus_minus(row.beyond), plus_minus(row.overlap)]
        line += [
            "" if name == BASELINE else plus_minus(row.gain, "+"),
            f"{row.overlap.count}",
            *[plus_minus(row.recall)] * findings.causal,
        ]
        line += [f"{row[cost]:.1f}" for cost in ("forward", "backward", "time")]
        line += [plus_minus(estimate(rows[name], "own")) if name in rows else "" for rows in elsewhere.values()]
        lines.append(line)
    return Table("Estimators against exact OAR-P (float32)", columns, lines)


def _probes(findings: Findings) -> Table:
    """Each probe's estimates against its own exact OAR-P, and the exact ones against that of the first."""
    names = [name for name in BY_PROBE[1:] if name in findings.estimators]
    lines = []
    for way in (MAIN, *(probe for probe in PROBES if probe != findings.probe)):
        same = findings.rows(way).groupby([*GROUP, "estimator"]).head(findings.part)  # other probes score only these
        rows = dict(list(same.groupby("estimator")))
        line = [findings.probe if way == MAIN else way, plus_minus(estimate(rows[REFERENCE], "own"))]
        lines.append([*line, *(plus_minus(estimate(rows[name], "overlap")) for name in names)])
    columns = "probe", f"exact OAR-P of this probe against that of {findings.probe}", *names
    return Table("Probes: overlap of the top 20 % with exact OAR-P of the same probe", columns, lines)


def _split(findings: Findings, title: str, column: str, metric: str) -> Table:
    """A column a value of `column`. Of right and wrong answers, the sources that have both."""
    found = findings.main
    values = list(found[column].unique())
    if column == "answer":
        counts = found[found["estimator"] == BASELINE].groupby([*GROUP, column]).size().unstack(fill_value=0)
        both = counts.index[counts.min(axis=1) >= FEWEST]
        found = found[pd.MultiIndex.from_frame(found[GROUP]).isin(both)]
    lines = []
    for name in findings.summary.index:
        mine = found[found["estimator"] == name]
        lines.append([name, *(plus_minus(estimate(mine[mine[column] == value], metric)) for value in values)])
    return Table(title, ("estimator", *values), lines)


def _sampled(findings: Findings) -> Table:
    lines = []
    for source in findings.sources:
        counts = (f"{source[name]:.0f}" for name in ("scored", "left out", "reasoning tokens"))
        lines.append([" ".join(filter(None, map(source.get, GROUP))), *counts, f"{source['right']:.0%}"])
    return Table("What was sampled", ("source", "scored", "left out", "reasoning tokens", "right"), lines)


def notes_of(findings: Findings, model: str | None) -> list[str]:
    """What benchmarks/README.md says about how the study is kept fair is not repeated."""
    notes = [
        f"{len(findings.scored)} responses; probe {findings.probe}. Spearman and overlap of the 20 % "
        "largest scores are with exact OAR-P (PAD) in true float32 (no TF32). Kept: overlap of an estimator's scores with "
        "its own in float32. Columns of bfloat16 and of another seed, other probes, and estimators with fewer responses: the "
        f"first {findings.part} of each source; what is minus {BASELINE} is on the same responses.",
        "Beyond position: correlation of ranks, without the best quadratic function of the position; `position` is the place "
        "in the response, which knows nothing of the answer.",
        "Intervals (±, half the width at 95 %) are percentile bootstraps over responses within each source. They say nothing "
        f"about other models. Below {FEWEST} responses their number stands in place of an interval. By answer: sources with at "
        f"least {FEWEST} right and {FEWEST} wrong ones.",
        "Passes count tokens that went through the layers, over those of prompts and responses: masked copies read the prefix "
        "from a cache. A backward to the inputs alone costs about a forward. Time: seconds of all responses over those of a "
        "forward with logits, the median over sources.",
        "Names: `fisher 4`: mean of 4 draws; `oar_p sampled`: a token is replaced by a drawn one.",
        "Left out: without an answer, without reasoning, or cut off. Right: share of all that were sampled.",
    ]
    if findings.causal:
        notes.append(
            "Recall: share of the known causal tokens (results of steps) among as many top scores. In chain and lookup only "
            "the last step's are in reach of the answer once it is teacher-forced: no such score reaches 1."
        )
    if model is not None and re.fullmatch(rf"{smollm2.NAME}(-[\d.]+)?", Path(model).name):
        notes.append(smollm2.SOURCE)
    return notes
