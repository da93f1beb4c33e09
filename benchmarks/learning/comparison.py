"""What the records of a plan say: which rates were chosen, how fast each method learned, and whether GRPO was slower."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.learning.cost import flops_of, gain_at_equal, passes_of, tokens_of
from benchmarks.learning.plan import BASELINE, Plan
from benchmarks.learning.training import MAX_GRADIENT_NORM, Record
from benchmarks.report import COLOURS, Table, subplots
from benchmarks.statistics import Estimate, holm, mean_over_clusters

WINDOW = 5
"""Rewards are shown, and trainings judged to fall apart, on means of so many steps."""
SIGNIFICANT = 0.05
FALLEN = 0.1
"""A training fell apart if the share of right answers to held-out problems at its end is so far below that of its best `WINDOW`
steps in a row."""
HEADROOM = "blame"
"""The oracle whose gain the others' are given as a share of."""
KINDS = {
    "wrong_in_wrong": "wrong results",
    "right_in_wrong": "right results of wrong responses",
    "other_in_wrong": "other tokens of wrong responses",
    "result_in_right": "results of right responses",
    "other_in_right": "other tokens of right responses",
}
SECONDS = ["sample_seconds", "importance_seconds", "update_seconds"]
SPENT = ["tokens", "flops", "passes"]
MEANS = [*KINDS, "recall", "entropy", "length", "ess_ratio", "gradient_norm", "fallback/any", *SECONDS]

Named = Sequence[tuple[str, Record]]
"""Records, each with the name of its method."""


def means(record: Record) -> dict[str, float]:
    """Over the steps of a training, of what was measured: mean reward, and `MEANS`."""
    of = {name: [step[name] for step in record.steps if name in step] for name in ["reward", *MEANS]}
    return {name: float(np.mean(values)) for name, values in of.items() if values}


def by_run(records: Named, added: Mapping[str, float] = {}) -> pd.DataFrame:
    """A row a training; `added`: that of a plan."""
    rows = []
    for name, record in records:
        run = record.run
        row = {"task": run.task, "method": name, "lr": run.lr, "warm": run.warm, "seed": run.seed}
        row |= {"start": record.start, "held_out": record.held_out}
        row |= {"rewards": [step["reward"] for step in record.steps]}
        passes = passes_of(record.steps, added.get(name, 0.0 if name == BASELINE else math.nan))
        row |= {"tokens": tokens_of(record.steps), "flops": flops_of(record.steps), "passes": passes}
        rows.append(row | means(record))
    columns = ["task", "method", "lr", "warm", "seed", "start", "held_out", "rewards", *SPENT, "reward"]
    return pd.DataFrame(rows, columns=[*columns, *MEANS])


def fell_apart(runs: pd.DataFrame) -> pd.Series:
    """Whether each training did; false where it is shorter than `WINDOW` steps."""
    best = [pd.Series(rewards).rolling(WINDOW).mean().max() for rewards in runs["rewards"]]
    return np.array(best) - runs["held_out"] >= FALLEN


def chosen_rates(plan: Plan, records: Named) -> dict[tuple[str, str], float]:
    """Of each task and method the rate with the highest mean reward on the pairs of `choose`.

    A rate counts where all of its pairs are finished; without any it is the plan's first.
    """
    found = {(task, name): plan.rate_of.get(task, plan.rates[0]) for task in plan.tasks for name in plan.methods}
    if records:
        rates = by_run(records).groupby(["task", "method", "lr"])["reward"].agg(["size", "mean"])
        whole = rates[rates["size"] == len(plan.choose.all())]["mean"]
        for task, method in found:
            if (task, method) in whole.index.droplevel("lr"):
                found[task, method] = float(whole.loc[task, method].idxmax())
    return found


def tables(plan: Plan, chosen_from: Named, judged: Named) -> list[Table]:
    """All that a page shows, task by task."""
    runs, grid = by_run(judged, plan.added), by_run(chosen_from)
    gains = {(task, name): gain(plan, runs, task, name) for task in plan.tasks for name in plan.methods}
    tested = [(task, name) for task in plan.tasks for name in plan.named if name != BASELINE]
    corrected = dict(zip(tested, holm([gains[key][1] for key in tested]), strict=True))
    found = [_ahead(plan, runs)]
    for task in plan.tasks:
        found += [
            _compared(plan, task, runs, gains, corrected),
            _at_equal_cost(plan, task, runs),
            _paid(task, plan, runs),
        ]
    found += [_grid(task, plan, grid) for task in plan.tasks]
    return [table for table in found if table.rows]


def paired(runs: pd.DataFrame, task: str, method: str) -> pd.DataFrame:
    """A method's trainings of a task and GRPO's of the same pairs from the same weights, side by side."""
    of_task = runs[runs["task"] == task].set_index(["warm", "seed", "start"])
    ours, theirs = (of_task[of_task["method"] == name] for name in (method, BASELINE))
    return ours.join(theirs.add_suffix("_grpo"), how="inner")


def gain(
    plan: Plan, runs: pd.DataFrame, task: str, method: str, what: str = "reward", trimmed: bool = True
) -> tuple[Estimate, float]:
    """Of `what` over GRPO's, and its p; `SPENT` stand for the mean reward at equal numbers of them."""
    pairs = paired(runs, task, method)
    if what in SPENT:
        columns = pairs[["rewards", what, "rewards_grpo", f"{what}_grpo"]]
        difference = pd.Series(
            [gain_at_equal(*row) for row in columns.itertuples(index=False)], pairs.index, dtype=float
        )
    else:
        difference = pairs[what] - pairs[f"{what}_grpo"]
    return mean_over_clusters([list(of) for _, of in difference.groupby("warm")], plan.trim * trimmed)


def _ahead(plan: Plan, runs: pd.DataFrame) -> Table:
    """The pairs in which a method's mean reward is above GRPO's, and in which it fell apart."""
    rows = []
    for name in plan.methods:
        counts, apart = list[tuple[int, int]](), 0
        for task in plan.tasks:
            pairs = paired(runs, task, name)
            counts.append((int((pairs["reward"] > pairs["reward_grpo"]).sum()), len(pairs)))
            apart += int(fell_apart(pairs).sum())
        counts.append((sum(ahead for ahead, _ in counts), sum(of for _, of in counts)))
        if counts[-1][1]:
            shown = ["" if name == BASELINE else f"{ahead} of {of}" for ahead, of in counts]
            rows.append([name, *shown, f"{apart} of {counts[-1][1]}"])
    return Table("Pairs ahead of GRPO", ["method", *plan.tasks, "all tasks", "fell apart"], rows)


def _compared(
    plan: Plan,
    task: str,
    runs: pd.DataFrame,
    gains: Mapping[tuple[str, str], tuple[Estimate, float]],
    corrected: Mapping[tuple[str, str], float],
) -> Table:
    rows = []
    headroom = gains[task, HEADROOM][0].value if HEADROOM in plan.methods else math.nan
    for name in plan.methods:
        of, pairs = runs[(runs["task"] == task) & (runs["method"] == name)], paired(runs, task, name)
        if of.empty:
            continue
        line = [name, f"{of['lr'].iloc[0]:g}", f"{of['reward'].mean():.3f}"]
        if name == BASELINE:
            line += [""] * (6 if plan.trim else 5)
        else:
            estimate, p = gains[task, name]
            ahead = f"{(pairs['reward'] > pairs['reward_grpo']).sum()} of {len(pairs)}"
            holm_p = corrected.get((task, name), math.nan)
            verdict = "control or explored" if name not in plan.named else "not told apart from GRPO"
            if holm_p < SIGNIFICANT:
                verdict = "**faster**" if estimate.value > 0 else "**slower**"
            share = _number(estimate.value / headroom, ".2f") if headroom > 0 else "-"
            line += [signed(estimate), *([signed(gain(plan, runs, task, name, trimmed=False)[0])] if plan.trim else [])]
            line += [ahead, share, _number(holm_p if name in plan.named else p, ".2g"), verdict]
        late = "" if name == BASELINE else signed(gain(plan, runs, task, name, "held_out")[0])
        fallen = f"{fell_apart(of).sum()} of {len(of)}"
        rows.append([*line, fallen, f"{of['held_out'].mean():.3f}", late])
    columns = ["method", "lr", "mean reward", "minus GRPO's (95 %)", *(["not trimmed"] if plan.trim else [])]
    columns += ["ahead in", f"of {HEADROOM}'s gain", "p", "verdict", "fell apart", "held-out at the end"]
    return Table(f"{task}: mean reward over the run, against GRPO", [*columns, "minus GRPO's"], rows)


def _at_equal_cost(plan: Plan, task: str, runs: pd.DataFrame) -> Table:
    rows = []
    for name in plan.methods:
        of = runs[(runs["task"] == task) & (runs["method"] == name)]
        if of.empty or np.isnan(np.concatenate(list(of["flops"]))).any():
            continue
        tokens, flops = (np.mean([spent.sum() for spent in of[what]]) for what in ("tokens", "flops"))
        line = [name, f"{tokens / 1e3:.1f}", f"{flops / 1e9:.1f}", f"{flops / tokens / 1e6:.2f}"]
        equal = {"reward": "gain at equal steps (95 %)", "tokens": "at equal tokens sampled", "flops": "at equal FLOPs"}
        if plan.added:
            equal["passes"] = "at the costs of 7B"
        found = [gain(plan, runs, task, name, what)[0] for what in equal]
        rows.append(line + [signed(of) if name != BASELINE and math.isfinite(of.value) else "" for of in found])
    columns = ["method", "thousand tokens sampled", "GFLOP", "MFLOP a token", *equal.values()]
    return Table(f"{task}: gain at equal cost", columns, rows)


def _paid(task: str, plan: Plan, runs: pd.DataFrame) -> Table:
    rows = []
    for name in plan.methods:
        of = runs[(runs["task"] == task) & (runs["method"] == name)]
        if of.empty or name == BASELINE:
            continue
        seconds = of[SECONDS].median()
        price = seconds["importance_seconds"] / seconds.sum()
        shown = [_number(of[kind].mean(), ".2f") for kind in [*KINDS, "recall"]]
        others = [_number(of[kind].mean(), ".3g") for kind in ("entropy", "length", "gradient_norm")]
        rows.append([name, *shown, *others, _number(of["fallback/any"].mean(), ".1%"), f"{price:.0%}"])
    columns = ["method", *KINDS.values(), "recall", "entropy", "tokens", "gradient norm", "fell back"]
    return Table(f"{task}: mean weights, and what importance cost", [*columns, "share of the time"], rows)


def _grid(task: str, plan: Plan, runs: pd.DataFrame) -> Table:
    rows = []
    for name in plan.methods:
        of = runs[(runs["task"] == task) & (runs["method"] == name)].groupby("lr")["reward"].mean()
        if len(of):
            rows.append([name, *(_number(of.get(rate, math.nan), ".3f") for rate in plan.rates)])
    columns = ("method", *(f"{rate:g}" for rate in plan.rates))
    return Table(f"{task}: mean reward at each learning rate, on the pairs that it is chosen on", columns, rows)


def signed(of: Estimate) -> str:
    interval = f" ({of.low:+.3f} to {of.high:+.3f})" if math.isfinite(of.low) else ""  # none of a single cluster
    return f"{of.value:+.3f}{interval}"


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def notes(plan: Plan, chosen_from: Named, judged: Named) -> list[str]:
    """What one has to know to read the figures."""
    some = (judged or chosen_from)[0][1].run
    trainings = Counter((one.run.warm, one.run.seed) for _, one in judged)
    finished = sum(count == len(plan.tasks) * len(plan.methods) for count in trainings.values())
    ready = f"{finished} of {len(plan.judge.all())} pairs are finished."
    rates = f"One learning rate for all methods: another may suit some of them better. {ready}"
    if len(plan.rates) > 1:
        rates = (
            f"A pair is a warm model and a seed. Rates were chosen on models {_list(plan.choose.warm)} and seeds "
            f"{_list(plan.choose.seeds)}, the same grid for every method; methods are judged on models "
            f"{_list(plan.judge.warm)} and seeds {_list(plan.judge.seeds)}: {ready}"
        )
    runs = by_run(judged)
    compared = sum(len(paired(runs, task, name)) for task in plan.tasks for name in plan.methods if name != BASELINE)
    alone = int((runs["method"] != BASELINE).sum()) - compared
    left_out = f"{alone} trainings stand beside none of GRPO that began with the same weights: not compared."
    trimmed = ""
    if plan.trim:
        cut = int(plan.trim * len(plan.judge.warm))
        trimmed = f", with {cut} of {len(plan.judge.warm)} models left out at each end, and of Yuen's t-test for trimmed means"
    return [
        *([left_out] if alone else []),
        f"{plan.steps} steps of {some.prompts} prompts x {some.copies} responses, one Adam update each, gradients clipped at "
        f"{MAX_GRADIENT_NORM:g}, token mean, no KL term. Runs of one pair see the same "
        "problems and the same sampling noise. Importance and update share one forward.",
        rates,
        f"Intervals and p are those of a t-test over warm models, of the mean difference of each{trimmed}. p of "
        f"{_list(plan.named) or 'none'} is corrected (Holm) for their number on all tasks of the page; the others are controls "
        "or explored, and uncorrected.",
        "Weights: means over the steps of a run, of the tokens that can be reshaped. Recall: share of the results among as "
        "many of the highest scores. A response without differences falls back to GRPO.",
        f"Fell apart: the share of right answers to held-out problems at the end is {FALLEN:g} or more below that of the best "
        f"{WINDOW} steps in a row. At equal cost: mean reward of both trainings of a pair over what the cheaper one spends. "
        "Sampling a token is taken to cost its forward, importance costs what it adds to the update's own.",
        "Small models on made-up tasks: what holds here need not hold for yours.",
    ]


def _list(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def draw(plan: Plan, rates: Mapping[tuple[str, str], float], records: Named) -> Figure:
    """Reward against steps, and each pair's gain, at the rate of each task and method."""
    records = [(name, one) for name, one in records if one.run.lr == rates[one.run.task, name]]
    tasks = [task for task in plan.tasks if any(one.run.task == task for _, one in records)]
    figure, panels = subplots(len(tasks), 2, figsize=(11, 3.6 * len(tasks)), squeeze=False)
    runs = by_run(records)
    for row, task in zip(panels, tasks, strict=True):
        for number, name in enumerate(plan.methods):
            of = [
                [step["reward"] for step in one.steps]
                for method, one in records
                if method == name and one.run.task == task
            ]
            if not of:
                continue
            smooth = pd.DataFrame(of).T.rolling(WINDOW, min_periods=1).mean()
            colour, dashes = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
            row[0].plot(smooth.index + 1, smooth.mean(axis=1), label=name, color=colour, ls=dashes, lw=1.3)
            pairs = paired(runs, task, name)
            if name != BASELINE:
                gains = (pairs["reward"] - pairs["reward_grpo"]).groupby("warm").mean()
                row[1].plot(gains, np.full(len(gains), -number), "o", color=colour, ms=4, alpha=0.6)
                row[1].plot(gain(plan, runs, task, name)[0].value, -number, "|", color="black", ms=14)
        row[0].set(xlabel="step", ylabel=f"{task}: reward, mean of {WINDOW} steps")
        row[0].legend(frameon=False, fontsize=7)
        others = [number for number, name in enumerate(plan.methods) if name != BASELINE]
        row[1].set_yticks([-number for number in others], [list(plan.methods)[number] for number in others], fontsize=8)
        row[1].axvline(0, color="black", lw=0.8)
        row[1].set(xlabel="mean reward minus GRPO's, a dot a warm model")
    return figure
