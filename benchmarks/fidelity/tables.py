"""What the study says: its tables, the goals, and what a reader must know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import pandas as pd
from torch import Tensor

from benchmarks.fidelity.estimators import REFERENCE, Score, package_estimators
from benchmarks.fidelity.responses import Response
from benchmarks.fidelity.scores import mean_over_groups
from benchmarks.language import smollm2
from benchmarks.report import Table
from benchmarks.statistics import Estimate
from benchmarks.workload import DEFAULT
from oar_plugin.credit.probe import PROBES, Probe

BASELINE = f"{DEFAULT} 1"
"""What others are compared with: the package's default importance."""

MAIN, BF16, AGAIN = "float32", "bfloat16", "another seed"
"""Variants; those of other probes have their names."""
DRAWN = (BASELINE, "oar_g 1", "decision 1", "oar_p sampled")
"""What is judged with another seed."""
BY_PROBE = (REFERENCE, BASELINE, "oar_g 1")
"""What is judged under other probes."""

TITLES = {"overlap": "Overlap of the top 20 % with exact OAR-P", "recall": "Recall of causal tokens"}
GROUP = ["task", "length", "model"]

Example: TypeAlias = tuple[str, Response, dict[str, Tensor]]
"""A task, a response, and its scores `[R]` by estimator."""


@dataclass
class Findings:
    """What was measured with the package's estimators and those of `--also`.

    `judged` has a row for each source, variant, estimator and response, `costs` for each source and estimator.
    """

    probe: Probe
    added: Mapping[str, Score]
    sources: list[dict[str, Any]] = field(default_factory=list)
    judged: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    @cached_property
    def estimators(self) -> dict[str, Score]:
        return {**package_estimators(), **self.added}

    @property
    def own(self) -> list[str]:
        """Each importance at its own cost."""
        return list({name.split()[0]: name for name in reversed(self.estimators)}.values())

    @cached_property
    def variants(self) -> dict[str, pd.DataFrame]:
        """`judged` of each variant."""
        return dict(list(pd.DataFrame(self.judged).groupby("variant", sort=False)))

    @cached_property
    def main(self) -> pd.DataFrame:
        return self.variants[MAIN]

    @property
    def causal(self) -> bool:
        """Whether it is known which tokens decide the answer."""
        return bool(self.main["recall"].notna().any())

    @cached_property
    def summary(self) -> pd.DataFrame:
        """By estimator, the best first: an `Estimate` of each metric in float32, and costs."""
        metrics = ("spearman", "overlap", "gain", "recall")
        groups = self.main.groupby("estimator", sort=False)
        found = {name: {metric: estimate(rows, metric) for metric in metrics} for name, rows in groups}
        costs = pd.DataFrame(self.costs).groupby("estimator")
        passes = costs[["forward", "backward"]].mean()
        passes = passes.assign(passes=passes.sum(axis=1), time=costs["time"].median())
        best_first = sorted(found, key=lambda name: -found[name]["overlap"].value)
        return pd.DataFrame.from_dict(found, orient="index").join(passes).loc[best_first]

    def shown(self) -> list[str]:
        """Names that examples have room for, the best first."""
        return [name for name in self.summary.index if name in self.own]

    def runs(self) -> dict[str, Any]:
        """For the JSON: means over each source's right and wrong responses, and costs."""
        groups = pd.DataFrame(self.judged).groupby([*GROUP, "variant", "estimator", "answer"], sort=False)
        means = groups[["spearman", "overlap", "recall", "own"]].mean().round(4)
        means = means.assign(responses=groups.size()).reset_index()
        columns = means.astype(object).where(means.notna(), None).to_dict("list")
        costs = pd.DataFrame(self.costs).round(4).to_dict("list")
        return {"sources": self.sources, "means": columns, "costs": costs}


def estimate(rows: pd.DataFrame, metric: str) -> Estimate:
    """The mean over sources of a metric."""
    return mean_over_groups([list(values) for _, values in rows.groupby(GROUP, sort=False)[metric]])


def plus_minus(found: Estimate, sign: str = "") -> str:
    """With half the width of the interval; empty without data."""
    return f"{found.value:{sign}.2f} ± {(found.high - found.low) / 2:.2f}" if found.count else ""


def tables_of(findings: Findings) -> list[Table]:
    """The most important first."""
    tables = [_main(findings), _probes(findings)]
    for column in ("task", "length", "answer", "model"):
        if findings.main[column].nunique() > 1:
            known = TITLES if findings.causal else ("overlap",)
            tables += [_split(findings, f"{TITLES[metric]}, by {column}", column, metric) for metric in known]
    return [*tables, _sampled(findings)]


def _main(findings: Findings) -> Table:
    own = {
        variant: dict(list(findings.variants[variant].groupby("estimator")))
        for variant in (BF16, AGAIN)
        if variant in findings.variants
    }
    columns = ["estimator", "Spearman", "top 20 %", f"less {BASELINE}", *["causal recall"] * findings.causal]
    columns += ["forward", "backward", "time", *(f"top 20 %, {variant}" for variant in own)]
    columns += [f"its own in {variant}" for variant in own]
    lines = []
    for name, row in findings.summary.iterrows():
        line = [name, f"{row.spearman.value:.2f}", plus_minus(row.overlap)]
        line += ["" if name == BASELINE else plus_minus(row.gain, "+"), *[plus_minus(row.recall)] * findings.causal]
        line += [f"{row[cost]:.1f}" for cost in ("forward", "backward", "time")]
        for metric in ("overlap", "own"):
            line += [plus_minus(estimate(rows[name], metric)) if name in rows else "" for rows in own.values()]
        lines.append(line)
    return Table("Estimators against exact OAR-P (float32)", columns, lines)


def _probes(findings: Findings) -> Table:
    """Each probe's estimates against its own exact OAR-P, and the exact ones against that of the first."""
    names = [name for name in BY_PROBE if name in findings.estimators and name != REFERENCE]
    lines = []
    for variant in (MAIN, *(probe for probe in PROBES if probe != findings.probe)):
        rows = dict(list(findings.variants[variant].groupby("estimator")))
        exact = plus_minus(estimate(rows[REFERENCE], "own"))
        lines.append([findings.probe if variant == MAIN else variant, exact])
        lines[-1] += [plus_minus(estimate(rows[name], "overlap")) for name in names]
    columns = ("probe", f"exact, with that of {findings.probe}", *names)
    return Table("Probes: overlap of the top 20 % with exact OAR-P of the same probe", columns, lines)


def _split(findings: Findings, title: str, column: str, metric: str) -> Table:
    """A column a value of `column`."""
    values = list(findings.main[column].unique())
    lines = []
    for name in findings.summary.index:
        mine = findings.main[findings.main["estimator"] == name]
        lines.append([name, *(plus_minus(estimate(mine[mine[column] == value], metric)) for value in values)])
    return Table(title, ("estimator", *values), lines)


def _sampled(findings: Findings) -> Table:
    lines = []
    for source in findings.sources:
        shares = ("" if source[name] is None else f"{source[name]:.0%}" for name in ("right", "faithful"))
        name = " ".join(filter(None, (source[name] for name in GROUP)))
        counts = (f"{source[name]:.0f}" for name in ("responses", "unusable", "reasoning", "tokens"))
        lines.append([name, *counts, *shares])
    return Table(
        "What was sampled", ("source", "scored", "left out", "reasoning tokens", "tokens", "right", "faithful"), lines
    )


def notes_of(findings: Findings, model: str | None) -> list[str]:
    """What benchmarks/README.md says about how the study is kept fair is not repeated."""
    notes = [
        f"{sum(source['responses'] for source in findings.sources)} responses; probe {findings.probe}. Spearman and overlap of "
        "the 20 % largest scores are with exact OAR-P (PAD) in float32, TF32 off; `its own` is the overlap of an estimator's "
        "scores with what it says itself in float32 with the first seed.",
        "Intervals (±, half the width at 95 %) are percentile bootstraps over responses within each task, length and model. "
        "They say nothing about other models.",
        "Passes count tokens that went through the layers, over those of the responses with their prompts: masked copies read "
        "the prefix from a cache. A backward to the inputs alone costs about a forward. Time: seconds for all responses over "
        "those of one forward with logits, the median over sources.",
        "Names: `fisher 4`: mean of 4 draws; `oar_p sampled`: replaced by a drawn token in place of padding; "
        "`hybrid 0.3`: exact copies of 30 %.",
        "Left out: responses without an answer, without reasoning, or cut off. Right: of all that were sampled.",
    ]
    if findings.causal:
        notes.append(
            "Recall: share of the known causal tokens (results of steps) among as many top scores. In chain and lookup only "
            "the last step's are in reach of the answer once it is teacher-forced: no such score reaches 1. Faithful: share of "
            "the answers that repeat the model's own results."
        )
    if model == smollm2.NAME:
        notes.append(smollm2.SOURCE)
    return notes
