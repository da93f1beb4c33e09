"""The numbers of several methods on several data sets, and the table that papers have."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oar_plugin.output import printable
from oar_plugin.runs.evaluate.grade import Graded
from oar_plugin.runs.evaluate.statistics import Estimate, Values, average, estimate, pass_at

AVERAGE = "average"
"""The line over all data sets, each counting the same."""


@dataclass(frozen=True)
class Line:
    """A method on a data set."""

    data: str
    method: str
    problems: int
    seeds: int
    estimates: Mapping[str, Estimate]  # by metric, shares between 0 and 1
    minus_baseline: Mapping[str, Estimate]  # paired over problems; empty for the baseline itself


def metrics(samples: int) -> list[str]:
    """avg, pass at 2, 4, ... samples, and maj; with one sample all of them are one."""
    fewer = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    more = [*(f"pass@{k}" for k in (*fewer, samples)), f"maj@{samples}"]
    return [f"avg@{samples}", *(more if samples > 1 else [])]


def shown(samples: int) -> list[str]:
    """The metrics of a table: avg, pass and maj of all samples."""
    names = metrics(samples)
    return names[:1] + names[1:][-2:]


def lines_of(results: Mapping[str, Mapping[str, Sequence[Graded]]], baseline: str, samples: int) -> list[Line]:
    """A line for each data set and method, and for the average of all data sets.

    Args:
        results: method -> data set -> its seeds.
        baseline: the method that the others are compared with.
    """

    def blocks(method: str, metric: str, names: Sequence[str]) -> list[Values]:
        return [np.stack([_values(metric, graded) for graded in results[method][name]]) for name in names]

    every = list(results[baseline])
    lines = []
    for label, names in [*((name, [name]) for name in every), *([(AVERAGE, every)] if len(every) > 1 else [])]:
        for method, of in results.items():
            values = {metric: blocks(method, metric, names) for metric in metrics(samples)}
            against = {metric: blocks(baseline, metric, names) for metric in values if method != baseline}
            lines.append(
                Line(
                    label,
                    method,
                    problems=sum(len(of[name][0].majority_P) for name in names),
                    seeds=len(of[names[0]]),
                    estimates={metric: estimate(each) for metric, each in values.items()},
                    minus_baseline={metric: estimate(values[metric], base) for metric, base in against.items()},
                )
            )
    return lines


def _values(metric: str, graded: Graded) -> Values:
    """Of each problem, (P,)."""
    name, _, k = metric.partition("@")
    if name == "avg":
        return average(graded.correct_PK)
    return graded.majority_P if name == "maj" else pass_at(int(k), graded.correct_PK)


def in_percent(value: Estimate, sign: str = "") -> str:
    """`41.3 ± 0.8`: mean and standard error."""
    return f"{100 * value.mean:{sign}.1f} ± {100 * value.se:.1f}"


def interval(value: Estimate) -> str:
    return f"{100 * value.low:+.1f} to {100 * value.high:+.1f}"


def _cell(name: str) -> str:
    """A name in a table, with nothing in it that Markdown or a terminal would take for its own."""
    return re.sub(r"[\\`*<>\[\]|]", r"\\\g<0>", printable(name)).replace("\n", " ")


def as_markdown(lines: Sequence[Line], baseline: str, samples: int) -> str:
    """For each shown metric a table with a row a method and a column a data set with its number of problems."""
    problems = {line.data: line.problems for line in lines}
    methods = dict.fromkeys(line.method for line in lines)
    parts = []
    for metric in shown(samples):
        rows = [["", *(f"{_cell(name)} ({count})" for name, count in problems.items())], ["---"] * (len(problems) + 1)]
        for method in methods:
            own = [line for line in lines if line.method == method]
            rows.append([_cell(method), *(in_percent(line.estimates[metric]) for line in own)])
            differences = [line.minus_baseline[metric] for line in own if line.minus_baseline]
            if differences:
                cells = [f"{in_percent(each, '+')} ({interval(each)})" for each in differences]
                marked = [f"**{c}**" if d.leaves_out_zero else c for c, d in zip(cells, differences, strict=True)]
                rows.append([f"{_cell(method)} - {_cell(baseline)}", *marked])
        parts.append(f"## {metric}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    note = "Percent ± standard error. Differences are paired over problems; bold where their 95 % interval leaves out zero."
    return "\n".join(parts) + f"\n{note} {_covers(lines)}\n"


def _covers(lines: Sequence[Line]) -> str:
    """What the intervals take in."""
    alone = ", ".join(dict.fromkeys(_cell(line.method) for line in lines if line.seeds == 1))
    seeds = f"but no other training seeds: there is one of {alone}" if alone else "and other training seeds"
    return f"Intervals take in other problems of the kind and other responses, {seeds}."
