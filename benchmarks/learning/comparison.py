"""What the records of a study say: how fast each method learned, and whether GRPO was slower by more than chance."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.learning.training import CREDIT, Record, Run, Training
from benchmarks.report import COLOURS, Table, subplots
from benchmarks.statistics import Estimate, holm, mean_difference
from oar_plugin.credit.gate import gate_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLDS = (0.5, 0.6, 0.7, 0.8)
WINDOW = 5
"""Steps that the training reward is averaged over before it is held against a threshold, or drawn."""
SIGNIFICANT = 0.05
DIAGNOSTICS = (
    "entropy",
    "length",
    "ess_ratio",
    "top10_mass",
    "gradient_norm",
    "recall",
    "weight_causal",
    "weight_other",
)
SECONDS = ("sample_seconds", "importance_seconds", "update_seconds")
SHOWN = ("reward", *DIAGNOSTICS, *SECONDS)
"""What a page needs of each step."""


@dataclass(frozen=True)
class Arm:
    """All trainings that differ in nothing but the seed; the seed in `run` means nothing.

    `records` are by seed and warm start, what the two runs of a pair have in common. So are all series.
    """

    run: Run
    records: Mapping[tuple[int, int], Record]

    def series(self, name: str) -> pd.DataFrame:
        """A quantity, a row a training and a column a step; NaN where a step has none."""
        values = {pair: [step.get(name, math.nan) for step in record.steps] for pair, record in self.records.items()}
        return pd.DataFrame(values, dtype=float).T

    def rewards(self) -> pd.Series:
        """Mean training reward over the whole run."""
        return self.series("reward").mean(axis=1)

    def curves(self) -> pd.DataFrame:
        """Smoothed training reward."""
        return self.series("reward").T.rolling(WINDOW, min_periods=1).mean().T

    def reached(self, threshold: float) -> pd.Series:
        """First step (from 1) at which the smoothed reward is at `threshold`; infinity where it never is."""
        there = self.curves() >= threshold
        return (there.idxmax(axis=1) + 1.0).where(there.any(axis=1), math.inf)

    def seconds(self) -> np.ndarray:
        """Up to the end of each step. A step is the median over seeds: one that was held up by other work does not count."""
        sample, importance, update = (self.series(part).fillna(0.0) for part in SECONDS)
        return np.asarray((sample + importance + update).median().cumsum())


def tasks_of(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.run.task for record in records))


def arms(records: Iterable[Record], task: str) -> list[Arm]:
    """Of a task, in order of their names and learning rates."""
    by_run: dict[Run, dict[tuple[int, int], Record]] = defaultdict(dict)
    for record in records:
        if record.run.task == task:
            by_run[record.run.arm][record.run.seed, record.run.warm_start] = record
    return sorted((Arm(*each) for each in by_run.items()), key=lambda arm: (arm.run.name, arm.run.lr))


def best(every: Iterable[Arm]) -> list[Arm]:
    """Of each method the learning rate with the highest mean reward, among those with the most seeds; best method first."""
    ranked = sorted(every, key=lambda arm: (len(arm.records), arm.rewards().mean()))
    chosen = {arm.run.name: arm for arm in ranked}  # the last one stays
    return sorted(chosen.values(), key=lambda arm: -arm.rewards().mean())


class Comparison(NamedTuple):
    """An arm against GRPO on the seeds that both have; `difference` is of the mean reward over the run."""

    difference: Estimate
    p: float
    ahead: str
    steps: str
    p_steps: float

    def verdict(self, p_holm: float) -> str:
        if not p_holm < SIGNIFICANT:  # NaN with fewer than two pairs, and where nothing differs
            return "not judged" if math.isnan(p_holm) else "not told apart"
        return "faster" if self.difference.value > 0 else "slower"


def compare(arm: Arm, grpo: Arm) -> Comparison | None:
    """None where they have no seed in common."""
    ours, theirs = arm.rewards().align(grpo.rewards(), join="inner")
    if ours.empty:
        return None
    difference, p = mean_difference(ours.tolist(), theirs.tolist())
    steps, p_steps, longest = "-", math.nan, arm.run.steps + 1  # what counts for a run that never got there
    for threshold in THRESHOLDS:  # the highest that at least half of the runs of each reached
        both = arm.reached(threshold).align(grpo.reached(threshold), join="inner")
        if all(np.isfinite(reached).mean() >= 0.5 for reached in both):
            later = both[0].clip(upper=longest) - both[1].clip(upper=longest)
            steps = f"{later.median():+g} to {threshold:.0%}"
            p_steps = stats.wilcoxon(later).pvalue if len(later) > 1 and later.any() else math.nan
    return Comparison(difference, p, f"{(ours > theirs).sum()} of {len(ours)}", steps, p_steps)


def tables(choosing: Sequence[Record], judged: Sequence[Record]) -> list[Table]:
    """All that a page shows, task by task."""
    found = []
    for task in tasks_of(judged):
        every = best(arms(judged, task))
        against = [(arm, grpo) for grpo in every if grpo.run.name == "grpo" for arm in every if arm is not grpo]
        found.append(_tests(f"{task}: mean reward over the run against GRPO, same seeds", against))
        found.append(_rewards(f"{task}: how fast each method learned", every))
        found.append(_credit(f"{task}: where the credit went, and what it cost", every))
        chosen_from = arms(choosing, task)
        found.append(
            _rewards(f"{task}: every learning rate that a method had, on the seeds it was chosen on", chosen_from)
        )
    return [table for table in found if table.rows]


def variants(records: Sequence[Record]) -> list[Table]:
    """Every setting that was run, against GRPO at the same learning rate."""
    found = []
    for task in sorted(tasks_of(records)):
        every = arms(records, task)
        by_run = {arm.run: arm for arm in every}
        pairs = [(arm, by_run.get(arm.run.baseline, arm)) for arm in every]
        against = [(arm, grpo) for arm, grpo in pairs if arm is not grpo]
        found.append(_tests(f"{task}: against GRPO at the same learning rate, same seeds", against))
        found.append(_rewards(f"{task}: every setting", every))
    return found


def _tests(title: str, against: Sequence[tuple[Arm, Arm]]) -> Table:
    found = [(arm.run, comparison) for arm, grpo in against if (comparison := compare(arm, grpo)) is not None]
    rows = []
    for (run, each), p_holm in zip(found, holm([each.p for _, each in found]), strict=True):
        p_values = (_number(p, ".2g") for p in (each.p, p_holm, each.p_steps))
        cells = [str(each.difference), each.ahead, each.steps, *p_values, each.verdict(p_holm)]
        rows.append([run.name, f"{run.lr:g}", *cells])
    columns = ("method", "lr", "reward, minus GRPO's", "ahead in", "steps", "p", "p (Holm)", "p (steps)", "verdict")
    return Table(title, columns, rows)


def _rewards(title: str, every: Sequence[Arm]) -> Table:
    rows = []
    for arm in every:
        rewards, held_out = arm.rewards(), [record.held_out[max(record.held_out)] for record in arm.records.values()]
        spread = f" ± {rewards.std():.3f}" if len(rewards) > 1 else ""
        steps = [_number(arm.reached(threshold).median(), "g") for threshold in THRESHOLDS]
        seeds = " ".join(str(seed) for seed, _ in sorted(arm.records))
        cells = [f"{rewards.mean():.3f}{spread}", *steps, f"{np.mean(held_out):.3f}"]
        rows.append([arm.run.name, f"{arm.run.lr:g}", seeds, *cells])
    columns = ("method", "lr", "seeds", "mean reward", *(f"to {t:.0%}" for t in THRESHOLDS), "held-out at the end")
    return Table(title, columns, rows)


def _credit(title: str, every: Sequence[Arm]) -> Table:
    rows = []
    for arm in every:
        means = [_number(arm.series(name).stack().mean(), ".3g") for name in DIAGNOSTICS]
        sample, importance, update = (arm.series(name).stack().median() for name in SECONDS)
        rows.append([arm.run.name, *means, f"{importance:.2f}", f"{sample + update:.2f}"])
    names = (name.replace("_", " ") for name in DIAGNOSTICS)
    return Table(title, ("method", *names, "importance, s a step", "all else, s a step"), rows)


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def notes(choosing: Sequence[Record], judged: Sequence[Record], through_verl: bool) -> list[str]:
    """What one has to know to read the figures."""
    run, starts = judged[0].run, len({record.run.warm_start for record in judged})
    missing = ", ".join(sorted({"grpo", "random", "oracle"} - {record.run.method for record in judged}))
    chosen_on, judged_on = (sorted({record.run.seed for record in records}) for records in (choosing, judged))
    trainer = (
        "Real verl, Ray and vLLM on a CPU. Runs of one seed see the same problems in the same order. Importance shares the "
        "forward that computes log-probs; its seconds are what verl's timer says it adds."
        if through_verl
        else "Runs of one seed see the same problems and the same sampling noise, so differences are paired. Importance has a "
        "pass of its own here; in training it shares the forward that computes log-probs."
    )
    rates = f"Learning rates were chosen by mean reward on seeds {chosen_on}; methods are judged on seeds {judged_on}."
    return [
        f"{run.steps} steps of {run.prompts} prompts x {run.copies} responses, one Adam update each, clip 0.2 / 0.28, token "
        f"mean, no KL term; {starts} warm start(s).",
        trainer,
        rates if choosing else f"One learning rate for all methods: some may be better at another. Seeds {judged_on}.",
        *how_to_read(),
        "Controls: `random` is noise through the same gate, `uniform` a constant, `oracle` knows the causal tokens. "
        f"Left out here: {missing or 'nothing of grpo, random, oracle'}.",
        "Small models on made-up tasks: what holds here need not hold for yours.",
    ]


def how_to_read() -> list[str]:
    # A method's name has the settings that are not the defaults; tau is the gate's.
    settings = {name: getattr(Training, name) for name in CREDIT} | {"tau": gate_of(Training.gate).tau}
    return [
        "Mean reward: of the sampled training responses, over all steps. Steps to a threshold: first step at which the mean "
        f"of the last {WINDOW} rewards is there; median over seeds. p: paired t-test. p (Holm): corrected for the lines of a "
        f"table, not for tasks; the verdict asks for less than {SIGNIFICANT}. p (steps): Wilcoxon's signed-rank test.",
        f"Settings that are not named: {', '.join(f'{name}={value}' for name, value in settings.items())}.",
    ]


def grids(found: Iterable[Table]) -> list[str]:
    """Whether the methods of each task had the same learning rates to choose from, as the tables of them say."""
    rated = [table for table in found if "every learning rate" in table.title]
    uneven = []
    for table in rated:
        rates = pd.DataFrame(table.rows).groupby(0)[[1, 2]].apply(lambda rows: str(rows.values.tolist()))
        if rates.nunique() > 1:
            uneven.append(table.title.partition(":")[0])
    if not uneven:
        return ["Every method had the same grid of learning rates, on the same seeds."] if rated else []
    return [
        f"The methods did not have the same grid of learning rates on the same seeds ({', '.join(uneven)}): who has more to "
        "choose from has an advantage. The tables of every learning rate say what each had."
    ]


def draw(judged: Sequence[Record]) -> Figure:
    """Reward against steps and seconds, with 95 % bands over seeds."""
    tasks = tasks_of(judged)
    figure, panels = subplots(len(tasks), 2, figsize=(10, 3.6 * len(tasks)), squeeze=False, sharey="row")
    for row, task in zip(panels, tasks, strict=True):
        for number, arm in enumerate(best(arms(judged, task))):
            curves = arm.curves()
            mean, error = curves.mean(), stats.t.ppf(0.975, len(curves) - 1) * curves.sem()
            colour, dashes = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
            label = f"{arm.run.name}, lr {arm.run.lr:g} ({len(curves)})"
            for panel, across in zip(row, (np.arange(1, len(mean) + 1), arm.seconds()), strict=True):
                panel.plot(across, mean, label=label, color=colour, ls=dashes, lw=1.3)
                panel.fill_between(across, mean - error, mean + error, color=colour, alpha=0.12, lw=0)
        row[0].set(xlabel="step", ylabel=f"{task}: reward, mean of {WINDOW} steps")
        row[1].set(xlabel="seconds of training, importance included")
        row[0].legend(frameon=False, fontsize=7)
    return figure
