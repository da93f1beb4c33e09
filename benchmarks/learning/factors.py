"""The gain over GRPO at each level of what a plan varies: tables, and a picture of them."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.learning.comparison import HEADROOM, by_run, gain, signed
from benchmarks.learning.plan import BASELINE, Plan, Setting
from benchmarks.learning.training import Record
from benchmarks.report import COLOURS, Table, subplots
from benchmarks.statistics import Estimate

RESULTS = Path(__file__).parents[1] / "results"

Gains = dict[str, dict[str, dict[str, Estimate]]]
"""By factor, level and method."""


def gains(plan: Plan, judged: list[tuple[str, Record]]) -> Gains:
    """Levels and methods without trainings are left out."""
    here = by_run(judged)
    found: Gains = {}
    for factor, levels in plan.factors.items():
        for level, setting in levels.items():
            runs, task = (_earlier(setting), setting.task) if setting.earlier else (here, setting.name)
            trained = set(runs[runs["task"] == task]["method"])
            of = {name: gain(plan, runs, task, name)[0] for name in plan.methods if name in trained - {BASELINE}}
            found.setdefault(factor, {})[level] = of
    return found


def _earlier(setting: Setting) -> pd.DataFrame:
    rows = json.loads((RESULTS / f"{setting.earlier}.json").read_text(encoding="utf-8"))["runs"]["judged_on"]
    return pd.DataFrame(**rows)


def tables(plan: Plan, judged: list[tuple[str, Record]]) -> list[Table]:
    names = [name for name in plan.methods if name != BASELINE]
    return [
        Table(
            f"{factor}: mean reward minus GRPO's (95 %)",
            ["level", *names],
            [[level, *(signed(of[name]) if name in of else "-" for name in names)] for level, of in levels.items()],
        )
        for factor, levels in gains(plan, judged).items()
    ]


def draw(plan: Plan, judged: list[tuple[str, Record]]) -> Figure:
    """A panel a factor: the gain of each method at each level, with its interval."""
    found = gains(plan, judged)
    names = [name for name in plan.methods if name != BASELINE]
    figure, panels = subplots(1, len(found), figsize=(1.2 + 3.3 * len(found), 3.6), squeeze=False, sharey=True)
    for panel, (factor, levels) in zip(panels[0], found.items(), strict=True):
        for number, name in enumerate(names):
            shown = [(at, of[name]) for at, of in enumerate(levels.values()) if name in of]
            at_N = np.array([at for at, _ in shown]) + 0.09 * (number - (len(names) - 1) / 2)
            value_N = np.array([one.value for _, one in shown])
            reach_2N = np.abs(np.array([(one.low, one.high) for _, one in shown]).T - value_N)
            style = {"ms": 4, "lw": 1.3, "capsize": 2, "color": COLOURS[number]}
            label = f"{name} (an oracle)" if name == HEADROOM else name
            panel.errorbar(at_N, value_N, reach_2N, fmt="o-", label=label, **style)
        panel.axhline(0, color="black", lw=0.8)
        panel.set_xticks(range(len(levels)), list(levels))
        panel.set(xlabel=factor.replace("`", ""), xlim=(-0.5, len(levels) - 0.5))
    panels[0][0].set_ylabel("mean reward over training, minus GRPO's")
    panels[0][-1].legend(frameon=False, fontsize=8)
    return figure
