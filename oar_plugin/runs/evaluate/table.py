"""The estimates of several methods on several data sets, and their table."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oar_plugin.output import printable
from oar_plugin.runs.evaluate.grade import Graded
from oar_plugin.runs.evaluate.statistics import Estimate, Values, average, estimate, pass_at

AVERAGE = "average"  # name of the line for the mean over all data sets, with equal weights


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

    Args:
        results: method -> data set -> grades of each training seed.
        baseline: the method with which the others are compared.
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
        return average(graded.correct_PK)
    return graded.majority_P if name == "maj" else pass_at(int(k), graded.correct_PK)


def as_markdown(lines: Sequence[Line], baseline: str, samples: int) -> str:
    """Return three tables, avg, pass and maj at all samples: a row per method, a column per data set."""
    problems = {line.data: line.problems for line in lines}
    parts = []
    for metric in dict.fromkeys([f"avg@{samples}", *metrics(samples)[-2:]]):
        rows = [["", *(f"{_cell(name)} ({count})" for name, count in problems.items())], ["---"] * (len(problems) + 1)]
        for method in dict.fromkeys(line.method for line in lines):
            own = [line for line in lines if line.method == method]
            rows.append([_cell(method), *(_percent(line.estimates[metric]) for line in own)])
            if differences := [line.minus_baseline[metric] for line in own if line.minus_baseline]:
                rows.append([f"{_cell(method)} - {_cell(baseline)}", *map(_difference, differences)])
        parts.append(f"## {metric}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    alone = ", ".join(dict.fromkeys(_cell(line.method) for line in lines if line.seeds == 1))
    seeds = f"but not training seeds: there is only one of {alone}" if alone else "and training seeds"
    return (
        "\n".join(parts)
        + "\nPercent ± standard error. Differences are paired over problems; bold where their 95 % interval "
        f"excludes zero. Intervals cover resampled problems and responses, {seeds}.\n"
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
