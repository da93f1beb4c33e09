"""avg@k, pass@k and maj@k of several methods on several data sets: means with standard errors and 95 % intervals, and tables.

Shapes: P problems, K responses to each, S seeds (training runs of one method).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from oar_plugin.output import printable
from oar_plugin.runs.evaluate.grade import Graded

Values = NDArray[np.float64]
AVERAGE = "average"  # name of the line for the mean over all data sets, with equal weights


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and 95 % interval."""

    mean: float
    se: float
    low: float
    high: float

    @property
    def leaves_out_zero(self) -> bool:
        # A standard error of 0 does not mean certainty: all problems merely had the same value.
        return self.se > 0 and (self.low > 0 or self.high < 0)


def pass_at(k: int, correct_PK: NDArray[np.bool_]) -> Values:
    """Return pass@k of each problem: the chance that k of its responses, drawn without replacement, include a correct one.

    The estimate is unbiased (Chen et al. 2021, arXiv 2107.03374). At k = K it is 1 if any response is correct, else 0.
    """
    samples = correct_PK.shape[1]
    none_right = [math.comb(samples - right, k) / math.comb(samples, k) for right in correct_PK.sum(axis=1).tolist()]
    return 1.0 - np.array(none_right)


def estimate(values: Sequence[Values], minus: Sequence[Values] | None = None) -> Estimate:
    """Return the mean over problems; data sets have equal weights.

    Args:
        values: one array (S, P) per data set.
        minus: the baseline's arrays for the same problems; if given, the result is the mean of the paired differences.

    The variance has two parts. Over problems: the variance of the problems' values, caused by the choice of problems and the
    sampling of responses. Over seeds, if there are several: the variance of the runs' means beyond what the sampling of
    responses explains. With one seed this part is unknown and left out. The interval is Student's t (Welch and Satterthwaite).
    """
    base = minus if minus is not None else [np.zeros_like(block[:1]) for block in values]
    differences = [block.mean(axis=0) - other.mean(axis=0) for block, other in zip(values, base, strict=True)]
    mean = float(np.mean([each.mean() for each in differences]))
    # (summand of the variance, its degrees of freedom); 0 degrees: the summand could not be estimated.
    parts = [(_variance(each) / len(each) / len(values) ** 2, len(each) - 1) for each in differences]
    parts += [(_between_seeds(blocks), len(blocks[0]) - 1) for blocks in (values, base)]
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / freedom for part, freedom in parts if freedom > 0)
    freedom = variance**2 / spread if spread > 0 else math.inf
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return Estimate(mean, math.sqrt(variance), mean - half, mean + half)


def _between_seeds(blocks: Sequence[Values]) -> float:
    """Return the variance of the mean that is caused by seeds alone; 0 with one seed.

    The runs' means also differ because each run has its own responses. The part over problems already contains that variance,
    so it is subtracted here.
    """
    seeds = len(blocks[0])
    if seeds == 1:
        return 0.0
    run_means = np.mean([block.mean(axis=1) for block in blocks], axis=0)
    by_chance = 0.0
    for block in blocks:
        rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
        freedom = (seeds - 1) * (block.shape[1] - 1)
        if freedom > 0:
            by_chance += float((rest**2).sum()) / freedom / block.shape[1] / len(blocks) ** 2
    return max(0.0, _variance(run_means) - by_chance) / seeds


def _variance(values: Values) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Line:
    """The results of one method on one data set."""

    data: str
    method: str
    problems: int
    seeds: int
    estimates: Mapping[str, Estimate]  # metric -> estimate, between 0 and 1
    minus_baseline: Mapping[str, Estimate]  # metric -> mean paired difference; empty for the baseline


def metrics(samples: int) -> list[str]:
    """Return the names of the metrics: avg, pass at 2, 4, ... samples, and maj. With one sample all of them equal avg@1."""
    if samples == 1:
        return ["avg@1"]
    fewer = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [f"avg@{samples}", *(f"pass@{k}" for k in (*fewer, samples)), f"maj@{samples}"]


def lines_of(results: Mapping[str, Mapping[str, Sequence[Graded]]], baseline: str, samples: int) -> list[Line]:
    """Return a line per data set and method, and with several data sets a line per method for their mean.

    `results` is method -> data set -> grades of each training seed.
    """

    def blocks(method: str, metric: str, names: Sequence[str]) -> list[Values]:
        return [np.stack([_values(metric, graded) for graded in results[method][name]]) for name in names]

    every = list(results[baseline])
    lines = []
    for label, names in [*((name, [name]) for name in every), *([(AVERAGE, every)] if len(every) > 1 else [])]:
        for method, graded in results.items():
            values = {metric: blocks(method, metric, names) for metric in metrics(samples)}
            against = {metric: blocks(baseline, metric, names) for metric in values if method != baseline}
            lines.append(
                Line(
                    label,
                    method,
                    problems=sum(len(graded[name][0].majority_P) for name in names),
                    seeds=len(graded[names[0]]),
                    estimates={metric: estimate(each) for metric, each in values.items()},
                    minus_baseline={metric: estimate(values[metric], base) for metric, base in against.items()},
                )
            )
    return lines


def _values(metric: str, graded: Graded) -> Values:
    """Return the metric's value for each problem, shape (P,)."""
    name, _, k = metric.partition("@")
    if name == "avg":
        return graded.correct_PK.mean(axis=1, dtype=np.float64)
    return graded.majority_P if name == "maj" else pass_at(int(k), graded.correct_PK)


def as_rows(lines: Sequence[Line], baseline: str, samples: int) -> dict[str, list[list[str]]]:
    """Return three tables, avg, pass and maj at all samples: titles, then a row per method; a column per data set."""
    problems, tables = {line.data: line.problems for line in lines}, {}
    for metric in dict.fromkeys([f"avg@{samples}", *metrics(samples)[-2:]]):
        rows = [["", *(f"{_cell(name)} ({count})" for name, count in problems.items())]]
        for method in dict.fromkeys(line.method for line in lines):
            own = [line for line in lines if line.method == method]
            rows.append([_cell(method), *(_percent(line.estimates[metric]) for line in own)])
            if differences := [line.minus_baseline[metric] for line in own if line.minus_baseline]:
                rows.append([f"{_cell(method)} - {_cell(baseline)}", *map(_difference, differences)])
        tables[metric] = rows
    return tables


def as_markdown(tables: Mapping[str, list[list[str]]], lines: Sequence[Line]) -> str:
    """Return the tables of `as_rows` and how to read them."""
    parts = []
    for metric, (titles, *rows) in tables.items():
        marked = [titles, ["---"] * len(titles), *rows]
        parts.append(f"## {metric}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in marked))
    return "\n".join(parts) + f"\n{explained(lines)}\n"


def explained(lines: Sequence[Line]) -> str:
    alone = ", ".join(dict.fromkeys(_cell(line.method) for line in lines if line.seeds == 1))
    seeds = f"but not training seeds: there is only one seed of {alone}" if alone else "and training seeds"
    return (
        "Percent ± standard error. Differences are paired over problems; bold where their 95 % interval "
        f"excludes zero. Intervals cover resampled problems and responses, {seeds}."
    )


def _percent(value: Estimate, sign: str = "") -> str:
    """Return mean and standard error as `41.3 ± 0.8`."""
    return f"{100 * value.mean:{sign}.1f} ± {100 * value.se:.1f}"


def _difference(value: Estimate) -> str:
    text = f"{_percent(value, '+')} ({100 * value.low:+.1f} to {100 * value.high:+.1f})"
    return f"**{text}**" if value.leaves_out_zero else text


def _cell(name: str) -> str:
    """Escape a name's characters that Markdown or a terminal would interpret."""
    return re.sub(r"[\\`*<>\[\]|]", r"\\\g<0>", printable(name)).replace("\n", " ")
