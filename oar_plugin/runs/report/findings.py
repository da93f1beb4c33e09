"""What went wrong in a run, and when, as its metrics show it."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from oar_plugin.runs.report.logs import RunLog

REWARD = ("critic/score/mean", "critic/rewards/mean")
ENTROPY = ("actor/entropy", "actor/entropy_loss")

START = 5  # steps that say where a run began
GRADIENT_SPIKE, BEFORE = 10, 20  # times the median of so many steps before: Adam's second moment keeps it for long
ENTROPY_LEFT = 0.1  # of the start's: what is sampled then hardly differs, and groups have no signal
REWARD_LEFT, SMOOTH = 0.5, 10  # of the best mean of so many steps, counted from the lowest reward that a response got
REWARD_SEEN = 0.1  # of the range of rewards: below it a mean is made by few responses
BOUNDS = (
    # OAR then changes fewer than four responses of five.
    ("oar/fallback/any", 0.0, 0.2, "responses that stayed plain GRPO"),
    ("oar/answer_found", 0.8, 1.0, "responses with an answer; does algorithm.oar.answer_patterns fit?"),
    # One token of twenty has all the credit.
    ("oar/ess_ratio", 0.05, 1.0, "few tokens hold all credit; lower beta or raise floor"),
    ("oar/lost_responses", 0.0, 0.0, "responses that a group lacks; did a reward raise, or an engine die?"),
    ("oar/dump_failed", 0.0, 0.0, "responses that could not be dumped; is the disk full?"),
    ("oar/dashboard_failed", 0.0, 0.0, "a dashboard did not take weights and responses; the run's output says why"),
    # Responses that are cut off have no answer and so no reward: the model then learns to write less, not to be right.
    ("response_length/clip_ratio", 0.0, 0.2, "responses at data.max_response_length"),
)
"""Metric, what is fine of it, and what it says."""


def findings(run: RunLog) -> list[list[str]]:
    """A row each, in the order of their first steps: its steps, what it was."""
    found = [(steps, what) for steps, what in _found(run) if steps.number]
    return [[str(steps), what] for steps, what in sorted(found, key=lambda finding: finding[0].first)]


class Steps(NamedTuple):
    """Of a finding."""

    first: int
    last: int
    number: int = 1

    def __str__(self) -> str:
        return f"{self.first} to {self.last}, {self.number} steps" if self.number > 1 else str(self.first)


def _where(bad: pd.Series) -> Steps:
    steps = bad.index[bad].tolist()
    return Steps(steps[0], steps[-1], len(steps)) if steps else Steps(0, 0, 0)


def _found(run: RunLog) -> Iterator[tuple[Steps, str]]:
    for name, column in run.metrics.items():
        yield _where(np.isinf(column)), f"{name} is not finite"
    for name, least, most, what in BOUNDS:
        column = run.column(name)
        beyond = (column - column.clip(least, most)).abs()
        worst = column[beyond.idxmax()] if len(column) else 0.0
        yield _where(beyond > 0), f"{name} at {worst:.3g} (fine: {least:g} to {most:g}): {what}"
    norm = run.column("actor/grad_norm")
    usual = norm.rolling(BEFORE, min_periods=START).median().shift()
    yield _where(norm > GRADIENT_SPIKE * usual), f"actor/grad_norm: over {GRADIENT_SPIKE} times its median before"
    entropy = run.column(*ENTROPY)
    start = entropy.iloc[:START].mean()
    yield _where(entropy < ENTROPY_LEFT * start), f"actor/entropy: below {ENTROPY_LEFT:.0%} of its start ({start:.3g})"
    lowest, highest = run.column("critic/score/min").min(), run.column("critic/score/max").max()
    lowest, highest = np.nan_to_num(lowest), np.nan_to_num(highest, nan=1.0)
    reward = run.column(*REWARD).rolling(SMOOTH).mean() - lowest
    best = reward.cummax()
    collapsed = (reward < REWARD_LEFT * best) & (best > REWARD_SEEN * (highest - lowest))
    yield _where(collapsed), f"reward: below {REWARD_LEFT:.0%} of its best, in means of {SMOOTH} steps"
    for step, again in run.resumed.items():
        yield Steps(step, step), f"started again here, from a checkpoint: {again} logged steps were done again"
    trained = run.column(*REWARD).index
    gaps = [range(before + 1, after) for before, after in pairwise(trained) if after > before + 1]
    if gaps:  # a broken line may name any step: nothing is made of each
        yield Steps(gaps[0][0], gaps[-1][-1], sum(gap.stop - gap.start for gap in gaps)), "not in the log"
    total = run.whole("trainer.total_training_steps")
    last = int(run.metrics.index[-1])
    if total and last < total:
        yield Steps(last, last), f"ended before its last step, {total}"
    elif run.state not in ("", "finished"):
        yield Steps(last, last), f"the last step in the log; run.yaml calls the run {run.state}"
