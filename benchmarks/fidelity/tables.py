"""What the study says: its tables, the goals, and what a reader must know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import pandas as pd
from torch import Tensor

from benchmarks.fidelity.estimators import REFERENCE, Score, package_estimators
from benchmarks.fidelity.responses import Response
from benchmarks.fidelity.scores import mean_over_groups
from benchmarks.report import Table
from benchmarks.statistics import Estimate
from benchmarks.workload import DEFAULT

BASELINE = f"{DEFAULT} 1"
"""What others are compared with: the package's default importance."""

TITLES = {"overlap": "Overlap of the top 20 % with exact OAR-P", "recall": "Recall of causal tokens"}

Example: TypeAlias = tuple[str, Response, dict[str, Tensor]]
"""A task, a response, and its scores `[R]` by estimator."""


@dataclass
class Findings:
    """What was measured with the package's estimators and those of `--also`; tables are of the first dtype, but for a column.

    `judged` has a row for each model, dtype, estimator and response, `costs` for each task and estimator.
    """

    dtypes: Sequence[str]
    added: Mapping[str, Score]
    models: list[dict[str, Any]] = field(default_factory=list)
    judged: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    @cached_property
    def estimators(self) -> dict[str, Score]:
        return {**package_estimators(), **self.added}

    def rows(self, dtype: str) -> pd.DataFrame:
        """`judged` in a dtype."""
        return pd.DataFrame([row for row in self.judged if row["dtype"] == dtype])

    @cached_property
    def main(self) -> pd.DataFrame:
        """`rows` of the first dtype."""
        return self.rows(self.dtypes[0])

    @cached_property
    def summary(self) -> pd.DataFrame:
        """By estimator, the best first: an `Estimate` of each metric in the first dtype, and costs."""
        metrics = ("spearman", "overlap", "gain", "recall")
        groups = self.main.groupby("estimator", sort=False)
        found = {name: {metric: estimate(rows, metric) for metric in metrics} for name, rows in groups}
        costs = pd.DataFrame(self.costs).groupby("estimator")
        passes = costs[["forward", "backward"]].mean()
        passes = passes.assign(passes=passes.sum(axis=1), time=costs["time"].median())
        best_first = sorted(found, key=lambda name: -found[name]["overlap"].value)
        return pd.DataFrame.from_dict(found, orient="index").join(passes).loc[best_first]

    def shown(self) -> list[str]:
        """Names that examples have room for: each importance at its own cost, the best first."""
        own = {name.split()[0]: name for name in reversed(self.estimators)}.values()
        return [name for name in self.summary.index if name in own]

    def runs(self) -> dict[str, Any]:
        """For the JSON: means over each model's right and wrong responses, and every single figure of the costs."""
        keys = ["task", "model", "dtype", "estimator", "answer"]
        groups = pd.DataFrame(self.judged).groupby(keys, sort=False)
        means = groups[["spearman", "overlap", "recall"]].mean().round(4)
        means = means.assign(responses=groups.size()).reset_index()
        columns = means.astype(object).where(means.notna(), None).to_dict("list")
        return {"models": self.models, "means": columns, "costs": self.costs}


def estimate(rows: pd.DataFrame, metric: str) -> Estimate:
    """The mean over models of a metric."""
    return mean_over_groups([list(values) for _, values in rows.groupby(["task", "model"], sort=False)[metric]])


def plus_minus(found: Estimate, sign: str = "") -> str:
    """With half the width of the interval; empty without data."""
    return f"{found.value:{sign}.2f} ± {(found.high - found.low) / 2:.2f}" if found.count else ""


def tables_of(findings: Findings) -> list[Table]:
    """The most important first."""
    tables = [_main(findings)]
    for column in ("task", "answer", "model"):
        if findings.main[column].nunique() > 1:
            tables += [_split(findings, f"{title}, by {column}", column, metric) for metric, title in TITLES.items()]
    return tables


def _main(findings: Findings) -> Table:
    first, *others = findings.dtypes
    columns = ["estimator", "Spearman", "top 20 %", f"less {BASELINE}", "causal recall"]
    columns += ["forward", "backward", "time", *(f"top 20 %, {dtype}" for dtype in others)]
    elsewhere = [dict(list(findings.rows(dtype).groupby("estimator"))) for dtype in others]
    lines = []
    for name, row in findings.summary.iterrows():
        line = [name, f"{row.spearman.value:.2f}", plus_minus(row.overlap)]
        line += ["" if name == BASELINE else plus_minus(row.gain, "+"), plus_minus(row.recall)]
        line += [f"{row[cost]:.1f}" for cost in ("forward", "backward", "time")]
        line += [plus_minus(estimate(rows[name], "overlap")) if name in rows else "" for rows in elsewhere]
        lines.append(line)
    return Table(f"Estimators against exact OAR-P ({first})", columns, lines)


def _split(findings: Findings, title: str, column: str, metric: str) -> Table:
    """A column a value of `column`."""
    values = list(findings.main[column].unique())
    lines = []
    for name in findings.summary.index:
        mine = findings.main[findings.main["estimator"] == name]
        lines.append([name, *(plus_minus(estimate(mine[mine[column] == value], metric)) for value in values)])
    return Table(title, ("estimator", *values), lines)


def notes_of(findings: Findings, probe: str) -> list[str]:
    """What benchmarks/README.md says about how the study is kept fair is not repeated."""
    responses = findings.main[findings.main["estimator"] == REFERENCE]
    unusable = sum(model["unusable"] for model in findings.models)
    models = "; ".join("{task} {number} {right:.0%} / {faithful:.0%}".format(**model) for model in findings.models)
    return [
        f"{len(responses)} responses, on average {responses['reasoning'].mean():.0f} reasoning tokens each; probe {probe}; "
        f"{unusable} more without an answer or without reasoning were left out.",
        "Spearman and overlap of the 20 % largest scores are with exact OAR-P (PAD) in float32. Recall: share of the known "
        "causal tokens (results of steps) among as many top scores. In chain and lookup only the last step's are in "
        "reach of the answer once it is teacher-forced: no such score reaches 1.",
        "Intervals (±, half the width at 95 %) are percentile bootstraps over responses within each task and model. They say "
        "nothing about other models; those are told apart below.",
        "Passes count tokens that went through the layers, over those of the micro-batch: masked copies read the prefix from a "
        "cache. A backward to the inputs alone costs about a forward. Time: median seconds of rounds, all in turn, over "
        "one plain forward with logits. On models this small they are mostly the overhead of calls.",
        "Names: `fisher 4`: mean of 4 draws; `oar_p span 2`: 2 tokens replaced at a time; `oar_p sampled`: by a drawn token; "
        "`hybrid 0.3`: exact copies of 30 %.",
        "Models (task, number, share of right answers when sampled / share of answers that repeat the model's own results): "
        f"{models}.",
    ]
