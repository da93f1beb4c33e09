"""What the records of a study say: how fast each method learned, and whether GRPO was slower by more than chance."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.learning.training import CREDIT, Record, Training
from benchmarks.report import COLOURS, Table, subplots
from benchmarks.statistics import holm, mean_difference
from oar_plugin.credit.gate import gate_of

THRESHOLDS = {f"to {share:.0%}": share for share in (0.5, 0.6, 0.7, 0.8)}
WINDOW = 5
"""Steps that the training reward is averaged over before it is held against a threshold, or drawn."""
SIGNIFICANT = 0.05
DIAGNOSTICS = ["entropy", "length", "ess_ratio", "top10_mass", "gradient_norm"]
DIAGNOSTICS += ["recall", "weight_causal", "weight_other"]
SECONDS = ["sample_seconds", "importance_seconds", "update_seconds"]
SHOWN = ["reward", *DIAGNOSTICS, *SECONDS]
"""What a page needs of each step."""
ARM = ["task", "method", "lr"]
"""Trainings that agree in these differ in nothing but the seed."""
RUN = [*ARM, "seed", "warm_start"]

Arm = tuple[str, str, float]


def by_step(records: Iterable[Record]) -> pd.DataFrame:
    """A row a step, the columns `RUN`, `SHOWN` and more; `smooth` is the mean reward of the last `WINDOW` steps."""
    rows = [
        {**vars(run), "method": run.name, "held_out": record.held_out.get(run.steps), "step": number, **step}
        for record in records
        for run in [record.run]
        for number, step in enumerate(record.steps, 1)
    ]
    floats = dict.fromkeys([*SHOWN, "held_out"], float)
    steps = pd.DataFrame(rows, columns=[*RUN, "step", *floats]).astype(floats)
    reward = steps.groupby(RUN)["reward"]
    steps["smooth"] = reward.transform(lambda of_run: of_run.rolling(WINDOW, min_periods=1).mean())
    return steps


def by_run(steps: pd.DataFrame) -> pd.DataFrame:
    """A row a training, by `RUN`: mean reward and first step (from 1) at each threshold, infinity where it never is."""
    found = steps.groupby(RUN).agg(reward=("reward", "mean"), held_out=("held_out", "last"), steps=("step", "max"))
    for name, share in THRESHOLDS.items():
        found[name] = steps[steps["smooth"] >= share].groupby(RUN)["step"].min()
        found[name] = found[name].fillna(math.inf)
    return found


def best(runs: pd.DataFrame) -> list[Arm]:
    """Of each task and method the learning rate with the highest mean reward, among those with the most seeds.

    The best method comes first.
    """
    rates = runs.groupby(ARM)["reward"].agg(["size", "mean"]).sort_values(["size", "mean"], kind="stable")
    chosen = rates.groupby(["task", "method"]).tail(1)  # the last one stays
    return list(chosen.sort_values("mean", ascending=False, kind="stable").index)


def tables(choosing: Sequence[Record], judged: Sequence[Record]) -> list[Table]:
    """All that a page shows, task by task."""
    steps, chosen_from = by_step(judged), by_run(by_step(choosing))
    found = []
    for task, of_task in steps.groupby("task", sort=False):
        runs = by_run(of_task)
        arms = best(runs)
        against = [(arm, grpo) for grpo in arms if grpo[1] == "grpo" for arm in arms if arm != grpo]
        rates = [arm for arm in every(chosen_from) if arm[0] == task]
        found += [
            compared(f"{task}: mean reward over the run against GRPO, same seeds", runs, against),
            _rewards(f"{task}: how fast each method learned", runs, arms),
            _credit(f"{task}: where the credit went, and what it cost", of_task, arms),
            _rewards(
                f"{task}: every learning rate that a method had, on the seeds it was chosen on", chosen_from, rates
            ),
        ]
    return [table for table in found if table.rows]


def variants(records: Iterable[Record]) -> list[Table]:
    """Every setting that was run, against GRPO at the same learning rate."""
    found = []
    for task, of_task in by_step(records).groupby("task"):
        runs = by_run(of_task)
        arms = every(runs)
        grpo = [(arm, (arm[0], "grpo", arm[2])) for arm in arms if arm[1] != "grpo"]
        against = [(arm, baseline) for arm, baseline in grpo if baseline in arms]
        found.append(compared(f"{task}: against GRPO at the same learning rate, same seeds", runs, against))
        found.append(_rewards(f"{task}: every setting", runs, arms))
    return found


def every(runs: pd.DataFrame) -> list[Arm]:
    return list(runs.groupby(ARM).groups)


def compared(title: str, runs: pd.DataFrame, against: Sequence[tuple[Arm, Arm]]) -> Table:
    """A line for every arm that has a seed in common with its baseline."""
    rows, tests = [], []
    for arm, baseline in against:
        ours, theirs = runs.loc[arm].align(runs.loc[baseline], join="inner", axis=0)
        if ours.empty:
            continue
        difference, p = mean_difference(ours["reward"].tolist(), theirs["reward"].tolist())
        later, p_steps, longest = "-", math.nan, ours["steps"].max() + 1  # what counts for a run that never got there
        for name in THRESHOLDS:  # the highest that at least half of the runs of each reached
            both = ours[name], theirs[name]
            if all(np.isfinite(reached).mean() >= 0.5 for reached in both):
                gap = both[0].clip(upper=longest) - both[1].clip(upper=longest)
                later = f"{gap.median():+g} {name}"
                p_steps = stats.wilcoxon(gap).pvalue if len(gap) > 1 and gap.any() else math.nan
        ahead = f"{(ours['reward'] > theirs['reward']).sum()} of {len(ours)}"
        rows.append([*_named(arm), str(difference), ahead, later])
        tests.append((difference.value, p, p_steps))
    for row, (gain, p, p_steps), p_holm in zip(rows, tests, holm([p for _, p, _ in tests]), strict=True):
        if math.isnan(p_holm):  # with fewer than two pairs, and where nothing differs
            verdict = "not judged"
        else:
            verdict = ("faster" if gain > 0 else "slower") if p_holm < SIGNIFICANT else "not told apart"
        row += [*(_number(value, ".2g") for value in (p, p_holm, p_steps)), verdict]
    columns = ("method", "lr", "reward, minus GRPO's", "ahead in", "steps", "p", "p (Holm)", "p (steps)", "verdict")
    return Table(title, columns, rows)


def _rewards(title: str, runs: pd.DataFrame, arms: Sequence[Arm]) -> Table:
    rows = []
    for arm in arms:
        of = runs.loc[arm]
        reward, seeds = of["reward"], " ".join(map(str, of.index.get_level_values("seed")))
        spread = f" ± {reward.std():.3f}" if len(of) > 1 else ""
        steps = [_number(of[name].median(), "g") for name in THRESHOLDS]
        rows.append([*_named(arm), seeds, f"{reward.mean():.3f}{spread}", *steps, f"{of['held_out'].mean():.3f}"])
    return Table(title, ("method", "lr", "seeds", "mean reward", *THRESHOLDS, "held-out at the end"), rows)


def _credit(title: str, steps: pd.DataFrame, arms: Sequence[Arm]) -> Table:
    rows = []
    for arm in arms:
        of = steps.groupby(ARM).get_group(arm)
        means = [_number(mean, ".3g") for mean in of[DIAGNOSTICS].mean()]
        sample, importance, update = of[SECONDS].median()
        rows.append([arm[1], *means, _number(importance, ".2f"), _number(sample + update, ".2f")])
    names = (name.replace("_", " ") for name in DIAGNOSTICS)
    return Table(title, ("method", *names, "importance, s a step", "all else, s a step"), rows)


def _named(arm: Arm) -> tuple[str, str]:
    return arm[1], f"{arm[2]:g}"


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
        *([_grids(choosing)] if choosing else []),
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


def _grids(choosing: Iterable[Record]) -> str:
    """Whether the methods of each task had the same learning rates to choose from."""
    runs = by_run(by_step(choosing)).reset_index()
    grid = runs.groupby(["task", "method"])[["lr", "seed"]].agg(tuple)
    uneven = [str(task) for task, of_task in grid.groupby("task") if len(of_task.drop_duplicates()) > 1]
    if not uneven:
        return "Every method had the same grid of learning rates, on the same seeds."
    return (
        f"The methods did not have the same grid of learning rates on the same seeds ({', '.join(uneven)}): who has more to "
        "choose from has an advantage. The tables of every learning rate say what each had."
    )


def draw(judged: Sequence[Record]) -> Figure:
    """Reward against steps and seconds, with 95 % bands over seeds."""
    tasks = list(by_step(judged).groupby("task", sort=False))
    figure, panels = subplots(len(tasks), 2, figsize=(10, 3.6 * len(tasks)), squeeze=False, sharey="row")
    for row, (task, steps) in zip(panels, tasks, strict=True):
        for number, arm in enumerate(best(by_run(steps))):
            of = steps.groupby(ARM).get_group(arm)
            curve = of.groupby("step")["smooth"].agg(["mean", "sem", "size"])
            error = stats.t.ppf(0.975, curve["size"] - 1) * curve["sem"]
            # A step is the median over seeds: one that was held up by other work does not count.
            seconds = of[SECONDS].sum(axis=1).groupby(of["step"]).median().cumsum()
            colour, dashes = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
            label = f"{arm[1]}, lr {arm[2]:g} ({curve['size'].max()})"
            for panel, across in zip(row, (curve.index, seconds), strict=True):
                panel.plot(across, curve["mean"], label=label, color=colour, ls=dashes, lw=1.3)
                low, high = curve["mean"] - error, curve["mean"] + error
                panel.fill_between(across, low, high, color=colour, alpha=0.12, lw=0)
        row[0].set(xlabel="step", ylabel=f"{task}: reward, mean of {WINDOW} steps")
        row[1].set(xlabel="seconds of training, importance included")
        row[0].legend(frameon=False, fontsize=7)
    return figure
