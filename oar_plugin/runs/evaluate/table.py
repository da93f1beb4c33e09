"""Grades responses by the recipes' own reward, and makes a table: means with standard errors, differences with 95 % intervals.

Shapes: P problems, K responses to each, S seeds (training runs of one method).
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import multimode

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from oar_plugin.output import printable
from oar_plugin.runs import reward  # first: it refuses a grader that cannot grade
from oar_plugin.runs.evaluate.responses import ProblemSet
from oar_plugin.runs.math.answer import canonical
from oar_plugin.runs.math.pool import TaskFailed

Values = NDArray[np.float64]
Metrics = dict[str, Values]  # avg@K, pass@K and maj@K of each problem, shape (P,); with K = 1 only avg@1
Results = Mapping[str, Mapping[str, Sequence[Metrics]]]  # method -> data set -> each training seed
Estimate = tuple[float, float, float, float]  # mean, standard error, 95 % interval
Tables = dict[str, dict[str, dict[str, Estimate]]]  # metric -> row -> column


def grade(problems: ProblemSet, responses: Sequence[Sequence[str]]) -> tuple[Metrics, float]:
    """Grade the responses to each problem, but equal ones once. Also return the share of responses without an answer."""
    keys = [(place, text) for place, row in enumerate(responses) for text in row]
    processes = max(2, min(16, os.cpu_count() or 2))
    pool = reward.start_pool(processes, timeout_s=10.0)  # the reward uses it, too

    def judge(key: tuple[int, str]) -> tuple[bool, str | None]:
        """Return whether it is right, and a name that is equal for answers that mean the same; None without an answer."""
        row = reward.compute_score(problems.name, key[1], problems.problems[key[0]][1])
        if row["acc"] == 1.0:
            return True, ""  # all right answers, whatever their notation
        if not (answer := row["extracted_answer"]):
            return False, None
        name = "".join(answer.split())
        if len(answer) <= reward.LONGEST_ANSWER:
            with suppress(TaskFailed):
                name = pool.run(canonical, answer)
        return False, name

    with ThreadPoolExecutor(processes) as threads:
        judged = dict(zip(once := dict.fromkeys(keys), threads.map(judge, once), strict=True))
    k, names = len(responses[0]), [judged[key][1] for key in keys]
    correct_PK = np.array([judged[key][0] for key in keys]).reshape(-1, k)
    most_P = np.array([majority(names[p * k : (p + 1) * k], row) for p, row in enumerate(correct_PK.tolist())])
    metrics = {f"avg@{k}": correct_PK.mean(axis=1)}
    if k > 1:  # else all of them are equal
        metrics |= {f"pass@{k}": correct_PK.any(axis=1).astype(float), f"maj@{k}": most_P}
    return metrics, names.count(None) / len(names)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return maj@K of one problem: the mean grade of the responses with the most frequent answer (or answers); None is none."""
    chosen = multimode(answer for answer in answers if answer is not None)
    grades = [right for answer, right in zip(answers, correct, strict=True) if answer in chosen]
    return float(np.mean(grades or [False]))


def estimate(values: Sequence[Values], minus: Sequence[Values] | None = None) -> Estimate:
    """Return the mean over problems; data sets have equal weights.

    `values` has one array (S, P) per data set. With `minus`, the baseline's arrays, it is the mean of the paired differences.
    The variance has a part over problems, caused by their choice and the sampling of responses, and a part over seeds, which is
    unknown and left out with one seed. The interval is Student's t (Welch and Satterthwaite).
    """
    base = minus if minus is not None else [np.zeros_like(block[:1]) for block in values]
    differences = [block.mean(axis=0) - other.mean(axis=0) for block, other in zip(values, base, strict=True)]
    mean = float(np.mean([each.mean() for each in differences]))
    # (summand of the variance, its degrees of freedom); 0 degrees: the summand could not be estimated.
    parts = [(each.var(ddof=len(each) > 1) / len(each) / len(values) ** 2, len(each) - 1) for each in differences]
    parts += [(_between_seeds(blocks), len(blocks[0]) - 1) for blocks in (values, base)]
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / freedom for part, freedom in parts if freedom > 0)
    freedom = variance**2 / spread if spread > 0 else math.inf
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return mean, math.sqrt(variance), mean - half, mean + half


def _between_seeds(blocks: Sequence[Values]) -> float:
    """Return the variance of the mean that is caused by seeds alone, beyond that of each run's responses; 0 with one seed."""
    seeds, by_chance = len(blocks[0]), 0.0
    for block in blocks:
        rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
        if freedom := (seeds - 1) * (block.shape[1] - 1):
            by_chance += float((rest**2).sum()) / freedom / block.shape[1] / len(blocks) ** 2
    return max(0.0, np.mean([block.mean(axis=1) for block in blocks], axis=0).var(ddof=seeds > 1) - by_chance) / seeds


def tables_of(results: Results, baseline: str) -> Tables:
    """Return for each metric a row per method, and one for its differences from the baseline; a column per data set."""
    sets = list(results[baseline])
    columns = {name: [name] for name in sets} | ({"average": sets} if len(sets) > 1 else {})

    def blocks(metric: str, method: str, column: str) -> list[Values]:
        return [np.stack([seed[metric] for seed in results[method][name]]) for name in columns[column]]

    tables: Tables = {}
    for metric in results[baseline][sets[0]][0]:
        rows = tables[metric] = {}
        for method in results:
            own, base = ([blocks(metric, of, column) for column in columns] for of in (method, baseline))
            rows[method] = dict(zip(columns, map(estimate, own), strict=True))
            if method != baseline:
                rows[f"{method} - {baseline}"] = dict(zip(columns, map(estimate, own, base), strict=True))
    return tables


def as_markdown(tables: Tables, results: Results, sizes: Mapping[str, int]) -> str:
    """Return the tables and how to read them. `sizes`: data set -> number of problems."""
    text, sizes = "", {**sizes, "average": sum(sizes.values())}
    for metric, rows in tables.items():
        titles = ["", *(f"{_cell(column)} ({sizes[column]})" for column in next(iter(rows.values())))]
        cells = [titles, ["---"] * len(titles)]
        for name, row in rows.items():
            cells.append([_cell(name), *(_number(value, "" if name in results else "+") for value in row.values())])
        text += f"## {metric}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in cells) + "\n"
    alone = ", ".join(_cell(method) for method, of in results.items() if len(next(iter(of.values()))) == 1)
    seeds = f"but not training seeds: there is only one seed of {alone}" if alone else "and training seeds"
    text += "Percent ± standard error. Differences are paired over problems; bold where their 95 % interval excludes"
    return f"{text} zero. Intervals cover resampled problems and responses, {seeds}.\n"


def _number(value: Estimate, sign: str) -> str:
    """Return `41.3 ± 0.8`, or with the sign `+` a difference as `+1.3 ± 0.8 (-0.3 to +2.9)`, bold if that excludes zero."""
    mean, se, low, high = (100 * part for part in value)
    text = f"{mean:{sign}.1f} ± {se:.1f}" + (f" ({low:+.1f} to {high:+.1f})" if sign else "")
    # A standard error of 0 does not mean certainty: all problems merely had the same value.
    return f"**{text}**" if sign and se > 0 and (low > 0 or high < 0) else text


def _cell(name: str) -> str:
    """Escape a name's characters that Markdown or a terminal would interpret."""
    return re.sub(r"[\\`*<>\[\]|]", r"\\\g<0>", printable(name)).replace("\n", " ")
