"""What `oar bench learning` says: curves with bands over seeds, tables, and paired tests against GRPO."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from benchmarks.learning.alignment import Alignment
from benchmarks.learning.measure import CREDIT_DEFAULTS, Record, Run
from benchmarks.machine import machine_line
from benchmarks.plots import pyplot
from oar_plugin.credit.gate import gate_of

TrainedBy = Literal["small", "verl"]

BASELINE = "grpo"
THRESHOLDS = (0.5, 0.6, 0.7, 0.8)
WINDOW = 5
"""Steps that the training reward is averaged over before it is held against a threshold, or drawn."""
_DIAGNOSTICS = {
    "entropy": "entropy",
    "length": "length",
    "ess_ratio": "ESS",
    "top10_mass": "top 10 % mass",
    "gradient_norm": "gradient norm",
    "recall": "causal recall",
    "weight_causal": "weight causal",
    "weight_other": "weight other",
}


@dataclass(frozen=True)
class Arm:
    """All trainings that differ in nothing but the seed.

    Attributes:
        run: their settings; the seed in it means nothing.
        records: by seed and warm start.
    """

    run: Run
    records: dict[tuple[int, int], Record]

    @property
    def name(self) -> str:
        return method_name(self.run)

    def rewards(self) -> dict[tuple[int, int], float]:
        """Mean training reward over the whole run, by seed."""
        return {key: statistics.fmean(record.series("reward")) for key, record in self.records.items()}

    def mean_reward(self) -> float:
        """Over runs and seeds."""
        return statistics.fmean(self.rewards().values())

    def mean(self, name: str) -> float:
        """Of a quantity over steps and seeds; NaN where it was never measured."""
        values = [x for record in self.records.values() for x in record.series(name) if not math.isnan(x)]
        return statistics.fmean(values) if values else math.nan

    def median(self, name: str) -> float:
        """The same, the median: for seconds."""
        values = [x for record in self.records.values() for x in record.series(name) if not math.isnan(x)]
        return statistics.median(values) if values else math.nan

    def held_out(self) -> float:
        """Final accuracy on held-out problems."""
        return statistics.fmean(record.held_out[max(record.held_out)] for record in self.records.values())

    def curves(self) -> np.ndarray:
        """Smoothed training reward, `[seeds, steps]`."""
        return np.stack([smooth(record.series("reward")) for record in self.records.values()])

    def seconds(self) -> np.ndarray:
        """Seconds up to the end of each step, `[steps]`; a step is the median over seeds, so that a run that was held up
        by something else on the machine does not count."""
        parts = ("sample_seconds", "importance_seconds", "update_seconds")
        each = [np.nansum([record.series(part) for part in parts], axis=0) for record in self.records.values()]
        return np.asarray(np.cumsum(np.median(each, axis=0)))

    def steps_to(self, threshold: float) -> float | None:
        """First step whose smoothed reward reaches `threshold`, median over seeds; None when half of them never do."""
        reached = [reach(curve, threshold) for curve in self.curves()]
        median = statistics.median(math.inf if step is None else step for step in reached)
        return None if math.isinf(median) else median


@dataclass(frozen=True)
class Comparison:
    """An arm against GRPO on the seeds that both have, each at its best learning rate.

    Attributes:
        arm: the arm.
        baseline: GRPO's.
        seeds: pairs.
        difference: of the mean reward over the run, mean over pairs.
        interval: of it, 95 % by Student's t; None with fewer than two pairs.
        p: of the paired t-test, two-sided; None with fewer than two pairs.
        wins: pairs in which the arm is ahead.
        p_holm: corrected for the comparisons of this task (Holm).
        steps: how many steps later it reached a threshold (earlier: negative), median over pairs; None where no threshold
            was reached in at least half of the pairs by both.
        threshold: the highest of which that is true. A run that never got there counts as one step longer than it was.
        p_steps: of Wilcoxon's signed-rank test on these differences; None with fewer than two pairs, or when all are zero.
    """

    arm: Arm
    baseline: Arm
    seeds: int
    difference: float
    interval: tuple[float, float] | None
    p: float | None
    wins: int
    p_holm: float | None = None
    steps: float | None = None
    threshold: float | None = None
    p_steps: float | None = None


def method_name(run: Run) -> str:
    """The method, and the settings that are not the defaults."""
    method = run.method.rpartition(":")[2]
    settings = {name: getattr(run, name) for name in CREDIT_DEFAULTS}
    changed = [
        f"{name}={str(value).rpartition(':')[2]}" for name, value in settings.items() if value != CREDIT_DEFAULTS[name]
    ]
    return " ".join([method, *changed])


def defaults() -> str:
    """The credit's settings where a method's name has none; tau is the gate's."""
    settings = CREDIT_DEFAULTS | {"tau": gate_of(CREDIT_DEFAULTS["gate"]).tau}
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def smooth(values: Sequence[float]) -> np.ndarray:
    """Mean over the last `WINDOW` steps, fewer at the beginning."""
    sums = np.cumsum(np.insert(np.asarray(values, dtype=float), 0, 0.0))
    end = np.arange(1, len(sums))
    start = np.maximum(end - WINDOW, 0)
    return np.asarray((sums[end] - sums[start]) / (end - start))


def reach(curve: np.ndarray, threshold: float) -> int | None:
    """First step (from 1) at which `curve` is at `threshold`."""
    at = np.flatnonzero(curve >= threshold)
    return int(at[0]) + 1 if len(at) else None


def arms(records: Sequence[Record], task: str) -> list[Arm]:
    """The arms of a task, in order of their names and learning rates."""
    found: dict[Run, dict[tuple[int, int], Record]] = defaultdict(dict)
    for record in records:
        if record.run.task == task:
            found[record.run.arm][record.run.seed, record.run.warm_start] = record
    return sorted((Arm(run, of_seed) for run, of_seed in found.items()), key=lambda arm: (arm.name, arm.run.lr))


def best(arm_list: Sequence[Arm]) -> list[Arm]:
    """Of each method and its settings the arm with the highest mean reward, among those with the most seeds; best first."""
    by_name: dict[str, list[Arm]] = defaultdict(list)
    for arm in arm_list:
        by_name[arm.name].append(arm)
    chosen = []
    for group in by_name.values():
        most = max(len(arm.records) for arm in group)
        chosen.append(max((arm for arm in group if len(arm.records) == most), key=lambda arm: arm.mean_reward()))
    return sorted(chosen, key=lambda arm: -arm.mean_reward())


def compare(arm_list: Sequence[Arm]) -> list[Comparison]:
    """Every method at its best learning rate against GRPO at its own; nothing where GRPO was not run."""
    chosen = best(arm_list)
    baseline = next((arm for arm in chosen if arm.name == BASELINE), None)
    if baseline is None:
        return []
    found = [_compare(arm, baseline) for arm in chosen if arm is not baseline]
    corrected = holm([c.p for c in found])
    return [replace(c, p_holm=p) for c, p in zip(found, corrected, strict=True)]


def variants(records: Sequence[Record]) -> list[list[str]]:
    """Cells of `VARIANT_COLUMNS`: every setting that was run, against GRPO at the same learning rate and on the same seeds."""
    rows = []
    for task in sorted(tasks_of(records)):
        every = sorted(arms(records, task), key=lambda arm: (arm.run.lr, arm.name))
        baselines = {arm.run.lr: arm for arm in every if arm.name == BASELINE}
        for arm in every:
            baseline = baselines.get(arm.run.lr)
            found = _compare(arm, baseline) if baseline is not None and arm is not baseline else None
            against = test_cells(found)[3:5] if found is not None and found.seeds else ["-", "-"]
            wins = f"{found.wins} of {found.seeds}" if found is not None and found.seeds else "-"
            rewards = arm.rewards().values()
            rows.append(
                [
                    task,
                    f"{arm.run.lr:g}",
                    arm.name,
                    str(len(rewards)),
                    f"{statistics.fmean(rewards):.3f}",
                    *against,
                    wins,
                ]
            )
    return rows


def _compare(arm: Arm, baseline: Arm) -> Comparison:
    from scipy import stats

    ours, theirs = arm.rewards(), baseline.rewards()
    keys = sorted(ours.keys() & theirs.keys())
    differences = [ours[key] - theirs[key] for key in keys]
    mean = statistics.fmean(differences) if differences else math.nan
    wins = sum(d > 0 for d in differences)
    threshold, steps = _steps_between(arm, baseline, keys)
    found = Comparison(
        arm,
        baseline,
        len(keys),
        mean,
        None,
        None,
        wins,
        steps=statistics.median(steps) if steps else None,
        threshold=threshold,
        p_steps=float(stats.wilcoxon(steps).pvalue) if len(steps) > 1 and any(steps) else None,
    )
    if len(keys) < 2 or len(set(differences)) < 2:
        return found
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    return replace(found, interval=(float(low), float(high)), p=float(test.pvalue))


def _steps_between(arm: Arm, baseline: Arm, keys: Sequence[tuple[int, int]]) -> tuple[float | None, list[int]]:
    """The highest threshold that at least half of the runs of each reach, and by how many steps later `arm` does so."""
    for threshold in reversed(THRESHOLDS):
        pairs = [
            tuple(reach(smooth(of.records[key].series("reward")), threshold) for of in (arm, baseline)) for key in keys
        ]
        if pairs and all(2 * sum(step is not None for step in side) >= len(keys) for side in zip(*pairs, strict=True)):
            never = len(baseline.records[keys[0]].steps) + 1
            return threshold, [(ours or never) - (theirs or never) for ours, theirs in pairs]
    return None, []


def holm(p_list: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for how many there are (Holm 1979); None stays None."""
    known = sorted((p, index) for index, p in enumerate(p_list) if p is not None)
    corrected: list[float | None] = [None] * len(p_list)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        corrected[index] = highest
    return corrected


# ---- the pages


def tasks_of(records: Sequence[Record]) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(record.run.task for record in records))


def reward_cells(arm: Arm) -> list[str]:
    """A row of the first table: settings and how fast it learned."""
    steps = ["-" if (step := arm.steps_to(threshold)) is None else f"{step:g}" for threshold in THRESHOLDS]
    rewards = list(arm.rewards().values())
    spread = f" ± {statistics.stdev(rewards):.3f}" if len(rewards) > 1 else ""
    return [
        arm.name,
        f"{arm.run.lr:g}",
        str(len(rewards)),
        f"{statistics.fmean(rewards):.3f}{spread}",
        *steps,
        f"{arm.held_out():.3f}",
    ]


VARIANT_COLUMNS = ("task", "lr", "method", "runs", "mean reward", "against GRPO", "95 % interval", "ahead in")
REWARD_COLUMNS = ("method", "lr", "seeds", "mean reward", *(f"to {t:.0%}" for t in THRESHOLDS), "held-out at the end")
TEST_COLUMNS = (
    "method",
    "lr",
    "pairs",
    "against GRPO",
    "95 % interval",
    "p",
    "p (Holm)",
    "ahead in",
    "steps",
    "p (steps)",
)
DIAGNOSTIC_COLUMNS = ("method", *_DIAGNOSTICS.values(), "importance, s a step", "all else, s a step")


def test_cells(found: Comparison) -> list[str]:
    """A row of the second table: the paired test."""
    interval = "too few pairs" if found.interval is None else f"{found.interval[0]:+.3f} .. {found.interval[1]:+.3f}"
    return [
        found.arm.name,
        f"{found.arm.run.lr:g}",
        str(found.seeds),
        f"{found.difference:+.3f}",
        interval,
        "-" if found.p is None else f"{found.p:.2g}",
        "-" if found.p_holm is None else f"{found.p_holm:.2g}",
        f"{found.wins} of {found.seeds}",
        "-" if found.steps is None else f"{found.steps:+g} to {found.threshold:.0%}",
        "-" if found.p_steps is None else f"{found.p_steps:.2g}",
    ]


def diagnostic_cells(arm: Arm) -> list[str]:
    """A row of the third table: what the credit looked like, and what it cost."""
    values = [arm.mean(name) for name in _DIAGNOSTICS]
    other = arm.median("sample_seconds") + arm.median("update_seconds")
    return [
        arm.name,
        *("-" if math.isnan(value) else f"{value:.3g}" for value in values),
        f"{arm.median('importance_seconds'):.2f}",
        f"{other:.2f}",
    ]


def sections(records: Sequence[Record], task: str) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Title, columns and rows of the tables of a task."""
    every = arms(records, task)
    found = compare(every)
    found_tables = [
        (f"{task}: every learning rate", REWARD_COLUMNS, [reward_cells(arm) for arm in every]),
        (
            f"{task}: each method at its best learning rate, best first",
            DIAGNOSTIC_COLUMNS,
            list(map(diagnostic_cells, best(every))),
        ),
    ]
    if found:
        title = f"{task}: mean reward over the run against GRPO, each at its best learning rate, same seeds"
        found_tables.insert(1, (title, TEST_COLUMNS, [test_cells(c) for c in found]))
    return found_tables


def tables(records: Sequence[Record]) -> list[Table]:
    """For the terminal."""
    return [_table(*section) for task in tasks_of(records) for section in sections(records, task)]


def variants_table(records: Sequence[Record]) -> Table:
    """For the terminal; see `variants`."""
    return _table("every finished run against GRPO at the same learning rate", VARIANT_COLUMNS, variants(records))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    return table


def _page_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def alignment_table(found: Sequence[Alignment], after: int) -> Table:
    """What `--alignment` shows of one task."""
    first = found[0]
    title = f"{first.run.task}: a batch's gradient and the policy gradient, after {after} steps of GRPO"
    table = Table(title=title, caption="progress: of a step of Adam along the policy gradient; ± standard error")
    for column in ("method", "progress", f"of {method_name(first.run)}'s", "difference", "cosine"):
        table.add_column(column)
    for each in found:
        share = each.progress / first.progress
        difference = f"{each.against:+.4f} ± {each.error:.4f}"
        table.add_row(method_name(each.run), f"{each.progress:.4f}", f"{share:.2f}", difference, f"{each.cosine:.3f}")
    return table


def notes(records: Sequence[Record], trained_by: TrainedBy = "small") -> list[str]:
    """What one has to know to read the figures."""
    run = records[0].run
    starts = len({record.run.warm_start for record in records})
    return [
        f"{run.prompts} prompts x {run.copies} responses a step, one Adam update each, clip 0.2 / 0.28, token mean, no KL "
        f"term; {starts} warm start(s).",
        "Runs of one seed see the same problems and the same sampling noise, so differences are paired."
        if trained_by == "small"
        else "Real verl, Ray and vLLM on a CPU. Runs of one seed see the same problems in the same order.",
        "Mean reward: of the sampled training responses, over all steps. Steps to a threshold: first step at which the mean "
        f"of the last {WINDOW} rewards is there; median over seeds.",
        "The best learning rate is chosen by mean reward on the same seeds, for GRPO as for the others: a little optimistic "
        "for all. p (Holm) is corrected for the comparisons of one task, not for tasks or learning rates.",
        "Importance has a pass of its own here. In training it shares the forward that computes log-probs."
        if trained_by == "small"
        else "Importance shares the forward that computes log-probs; its seconds are what verl's timer says it adds.",
        f"Settings that are not named: {defaults()}.",
        "Small models on made-up tasks: what holds here need not hold for yours.",
    ]


def markdown(
    records: Sequence[Record], plot: str | None, command: str, machine: dict[str, Any], trained_by: TrainedBy = "small"
) -> str:
    """The report as a page; `plot` is the file name of its plot, `machine` as `describe_machine` has it."""
    lines = ["# Does it learn faster?", "", machine_line(machine), "", f"`{command}`", ""]
    if plot is not None:
        lines += [f"![reward against steps and against seconds]({plot})", ""]
    for task in tasks_of(records):
        for title, columns, rows in sections(records, task):
            lines += [f"## {title}", "", *_page_table(columns, rows)]
    return "\n".join([*lines, "## How to read it", "", *(f"- {note}" for note in notes(records, trained_by)), ""])


def variants_page(records: Sequence[Record], command: str) -> str:
    """`variants` as a page."""
    run = records[0].run
    return "\n".join(
        [
            "# Every training that was finished",
            "",
            f"`{command}`",
            "",
            f"{run.steps} steps of {run.prompts} x {run.copies} responses. Mean reward over the run, and minus GRPO's of the "
            "same seed, warm model and learning rate; 95 % by Student's t, not corrected for the number of lines. Settings "
            f"that are not named: {defaults()}.",
            "",
            *_page_table(VARIANT_COLUMNS, variants(records)),
        ]
    )


def to_json(records: Sequence[Record], command: str, machine: dict[str, Any], trained_by: TrainedBy = "small") -> str:
    """The tables; what was measured at each step stays in the records."""
    content: dict[str, Any] = {
        task: [{"title": title, "columns": columns, "rows": rows} for title, columns, rows in sections(records, task)]
        for task in tasks_of(records)
    }
    return json.dumps(
        {"command": command, "machine": machine, "tasks": content, "notes": notes(records, trained_by)}, indent=1
    )


def draw(path: Path, records: Sequence[Record]) -> bool:
    """Reward against steps and seconds, each method at its best learning rate; False without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False

    tasks = tasks_of(records)
    figure, axes = plt.subplots(
        len(tasks), 2, figsize=(10, 3.6 * len(tasks)), dpi=140, layout="constrained", squeeze=False, sharey="row"
    )
    for row, task in zip(axes, tasks, strict=True):
        for number, arm in enumerate(best(arms(records, task))):
            curves = arm.curves()
            mean, count = curves.mean(0), len(curves)
            style: dict[str, Any] = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--", "lw": 1.3}
            label = f"{arm.name}, lr {arm.run.lr:g} ({count})"
            for place, across in zip(row, (np.arange(1, len(mean) + 1), arm.seconds()), strict=True):
                place.plot(across, mean, label=label, **style)
                if count > 1:
                    error = 1.96 * curves.std(0, ddof=1) / math.sqrt(count)
                    place.fill_between(across, mean - error, mean + error, color=style["color"], alpha=0.12, lw=0)
        row[0].set(xlabel="step", ylabel=f"{task}: reward, mean of {WINDOW} steps")
        row[1].set(xlabel="seconds of training, importance included")
        row[0].legend(frameon=False, fontsize=7)
        for place in row:
            place.grid(alpha=0.25)
            place.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
    return True
