"""Finds faults of a run, and the steps at which they occurred, in its metrics."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pandas as pd

from oar_plugin.runs.report.logs import RunLog

REWARD = ("critic/score/mean", "critic/rewards/mean")
ENTROPY = ("actor/entropy", "actor/entropy_loss")

START = 5  # number of first steps whose mean is a metric's start
GRADIENT_SPIKE = 10  # times the median of earlier norms; Adam's second moment remembers a spike for many steps
BEFORE = 20  # maximum number of earlier steps in that median
ENTROPY_LEFT = 0.1  # share of the start's entropy; below it responses hardly differ, and groups give no signal
REWARD_LEFT = 0.5  # share of the best reward; both are measured from the lowest reward of any response
SMOOTH = 10  # steps per mean of the reward
REWARD_SEEN = 0.1  # share of the range of rewards; a best mean below it comes from few responses
# (metric, lowest and highest healthy value, meaning of other values)
BOUNDS = (
    # Above 0.2, OAR changes fewer than four of five responses.
    ("oar/fallback/any", 0.0, 0.2, "responses that fell back to GRPO"),
    ("oar/answer_found", 0.8, 1.0, "responses with an answer; does algorithm.oar.answer_patterns fit?"),
    # At 0.05, one token in twenty has all the credit.
    ("oar/ess_ratio", 0.05, 1.0, "few tokens hold all credit; lower beta or raise floor"),
    (
        "oar/lost_responses",
        0.0,
        0.0,
        "responses missing from their groups; did a reward function raise, or an engine die?",
    ),
    ("oar/dump_failed", 0.0, 0.0, "responses that could not be dumped; is the disk full?"),
    ("oar/dashboard_failed", 0.0, 0.0, "a dashboard refused weights and responses; the run's output says why"),
    # A truncated response has no answer and no reward, so the model learns to write less instead of to be right.
    ("response_length/clip_ratio", 0.0, 0.2, "responses at data.max_response_length"),
)
Finding = tuple[int, int, int, str]  # first step, last step, number of steps, what went wrong


def findings(run: RunLog) -> list[list[str]]:
    """Return [steps, description] of each finding, ordered by first step."""
    ordered = sorted(_by_metric(run), key=lambda finding: finding[0])
    return [
        [f"{first} to {last}, {number} steps" if number > 1 else str(first), text]
        for first, last, number, text in ordered
    ]


def _by_metric(run: RunLog) -> Iterator[Finding]:
    def where(bad: pd.Series, text: str) -> Iterator[Finding]:
        if steps := bad.index[bad].tolist():
            yield steps[0], steps[-1], len(steps), text

    for name, column in run.metrics.items():
        yield from where(np.isinf(column), f"{name} is not finite")
    for name, least, most, text in BOUNDS:
        column = run.column(name)
        beyond = (column - column.clip(least, most)).abs()
        worst = column[beyond.idxmax()] if len(column) else 0.0
        yield from where(beyond > 0, f"{name} at {worst:.3g} (fine: {least:g} to {most:g}): {text}")
    norm = run.column("actor/grad_norm")
    usual = norm.rolling(BEFORE, min_periods=START).median().shift()
    yield from where(
        norm > GRADIENT_SPIKE * usual,
        f"actor/grad_norm: over {GRADIENT_SPIKE} times the median of up to {BEFORE} earlier steps",
    )
    entropy = run.column(*ENTROPY)
    start = entropy.iloc[:START].mean()
    text = f"actor/entropy: below {ENTROPY_LEFT:.0%} of its start ({start:.3g})"
    yield from where(entropy < ENTROPY_LEFT * start, text)
    lowest = np.nan_to_num(run.column("critic/score/min").min())
    highest = np.nan_to_num(run.column("critic/score/max").max(), nan=1.0)
    reward = run.column(*REWARD).rolling(SMOOTH).mean() - lowest
    best = reward.cummax()
    collapsed = (reward < REWARD_LEFT * best) & (best > REWARD_SEEN * (highest - lowest))
    yield from where(collapsed, f"reward: below {REWARD_LEFT:.0%} of its best (means over {SMOOTH} steps)")
    yield from _by_step(run)


def _by_step(run: RunLog) -> Iterator[Finding]:
    """Yield restarts, gaps in the log, and an early end."""
    for step, again in run.resumed.items():
        yield step, step, 1, f"resumed here from a checkpoint; {again} logged steps were repeated"
    gaps = [(before + 1, after - 1) for before, after in pairwise(run.column(*REWARD).index) if after > before + 1]
    if gaps:  # counted, not listed: a broken line may contain a huge step
        yield gaps[0][0], gaps[-1][1], sum(last - first + 1 for first, last in gaps), "not in the log"
    total, last = run.whole("trainer.total_training_steps"), int(run.metrics.index[-1])
    if total and last < total:
        yield last, last, 1, f"ended before its last step, {total}"
    elif run.state not in ("", "finished"):
        yield last, last, 1, f"the last step in the log; run.yaml calls the run {run.state}"
