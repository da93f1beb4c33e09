"""Reads a run's metrics from the files of verl's own loggers (`file`, `tensorboard`, offline `wandb`), and finds its faults."""

import json
import math
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from oar_plugin.output import printable
from oar_plugin.runs.recipe import flat
from oar_plugin.runs.run_folder import RunRefused, record_of

Row = tuple[int, dict[str, float]]  # step and metrics

SECONDS = "timing_s/step"
REWARD = ("critic/score/mean", "critic/rewards/mean")
ENTROPY = ("actor/entropy", "actor/entropy_loss")


class NoLogs(ValueError):
    """No readable log of verl was found. The message says which file is missing or wrong."""


@dataclass(frozen=True)
class RunLog:
    """One run.

    `metrics` has a row per step and a column per metric. nan: not logged; inf: logged, but not finite.
    """

    name: str  # name of its folder or file
    kind: str  # name of the logger
    starts: int
    metrics: pd.DataFrame
    resumed: dict[int, int]  # first step of a later start -> number of logged steps that it repeated
    settings: Mapping[str, Any]  # `a.b.c` -> value; empty if no file has them
    state: str = ""  # as in run.yaml; empty without one

    @property
    def seed(self) -> int | None:
        return self.whole("data.seed")

    def whole(self, name: str) -> int | None:
        """Return a setting as an integer; None if it is unknown or not a number."""
        try:
            return int(self.settings[name])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def column(self, *names: str) -> pd.Series:
        """Return step -> value of the first of these metrics that was logged; only finite values."""
        known = next((name for name in names if name in self.metrics), None)
        column = pd.Series(dtype=float) if known is None else self.metrics[known]
        return column[np.isfinite(column)]

    def seconds(self) -> pd.Series:
        """Return step -> seconds; nan if they were not logged."""
        return self.column(SECONDS).reindex(self.metrics.index)


def read_run(path: Path) -> RunLog:
    """Return the log of a run's folder, a JSONL file, a TensorBoard folder, or an offline run of wandb.

    Raise NoLogs if there is none, or if run.yaml is not of a run; ModuleNotFoundError if the logger's package is missing.
    """
    path = path.absolute()
    kind, files = _logs(path)
    settings: dict[str, Any] = {}
    steps, resumed = _merged(READERS[kind](file, settings) for file in files)
    if not steps:
        raise NoLogs(f"{path}: no step in it; verl's logger {kind!r} writes each step at its end")
    try:
        record = record_of(path)
    except RunRefused as error:
        raise NoLogs(str(error)) from error
    name = path.stem if path.is_file() else path.name
    metrics = pd.DataFrame.from_dict(steps, orient="index").sort_index()
    settings = record.get("settings", settings)
    return RunLog(name, kind, len(files), metrics, resumed, settings, record.get("state", ""))


def _logs(path: Path) -> tuple[str, list[Path]]:
    """Return the logger's name and its files, one per start, in the order of the starts."""
    path.stat()
    if path.is_file():
        return ("tensorboard" if "tfevents" in path.name else "wandb" if path.suffix == ".wandb" else "file"), [path]
    for kind, patterns in PLACES.items():
        if files := [file for pattern in patterns for file in path.glob(pattern)]:
            # Names contain a number or a time, which orders them.
            return kind, sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", str(file))])
    places = ", ".join(pattern for patterns in PLACES.values() for pattern in patterns)
    where = f"looked for {places}, there and up to two folders below"
    raise NoLogs(f"{path}: no logs of verl, {where}; set trainer.logger=[console,file] to write them")


def _merged(starts: Iterable[Iterable[Row]]) -> tuple[dict[int, dict[str, float]], dict[int, int]]:
    """Return step -> metrics, and `resumed`. A later start replaces the steps of earlier starts from its first step on."""
    steps: dict[int, dict[str, float]] = {}
    resumed: dict[int, int] = {}
    for rows in starts:
        begun = False
        for step, metrics in rows:
            # Before its first step, a start may log a validation of its checkpoint, under the checkpoint's step.
            if not begun and not all(name.startswith("val") for name in metrics):
                begun, known = True, len(steps)
                steps = {before: row for before, row in steps.items() if before < step}
                resumed |= {step: known - len(steps)} if known > len(steps) else {}
            # pandas refuses lone surrogates; `printable` escapes them.
            steps[step] = steps.get(step, {}) | {printable(name): value for name, value in metrics.items()}
    return steps, resumed


def _of_file(file: Path, settings: dict[str, Any]) -> Iterator[Row]:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            yield int(record["step"]), _metrics(record["data"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # incomplete: the run was killed, or is writing the line


def _of_tensorboard(file: Path, settings: dict[str, Any]) -> Iterator[Row]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    steps: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            steps.setdefault(event.step, {})[tag] = event.value
    yield from ((step, _metrics(row)) for step, row in sorted(steps.items()))


def _of_wandb(file: Path, settings: dict[str, Any]) -> Iterator[Row]:
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for written in _wandb_records(file.read_bytes()):
        try:
            record = Record.FromString(written)
            config, items = (
                {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in part}
                for part in (record.run.config.update, record.history.item)
            )
            step = int(items.pop("_step", record.history.step.num))
        except (DecodeError, ValueError, TypeError, OverflowError, RecursionError):
            return  # nothing after a broken record can be trusted
        settings.update((name, value) for name, value in flat(config) if not name.startswith("_"))
        if items:
            yield step, _metrics(items)


def _wandb_records(written: bytes) -> Iterator[bytes]:
    """Yield the complete records of a .wandb file; since 0.31 wandb has no reader in Python.

    After a header of 7 bytes comes LevelDB's log format: records are split into pieces, and no piece crosses a block's end.
    """
    block, head, whole_or_last = 32768, struct.Struct("<IHB"), (1, 4)
    at, record = 7 if written.startswith(b":W&B") else len(written), b""
    while at + head.size <= len(written):
        if (left := block - at % block) < head.size:
            at += left
            continue
        _, length, kind = head.unpack_from(written, at)
        at += head.size + length
        if at > len(written):
            return
        record += written[at - length : at]
        if kind in whole_or_last:
            yield record
            record = b""


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row, and inf for those that are not finite; for nan and inf verl's file logger writes null."""
    return {
        name: float(value) if value is not None and abs(value) <= sys.float_info.max else math.inf
        for name, value in row.items()
        if not name.startswith("_") and isinstance(value, int | float | None)
    }


READERS = {"file": _of_file, "tensorboard": _of_tensorboard, "wandb": _of_wandb}
# Logger -> patterns of its files, in a run's folder or in the folder that the logger wrote.
PLACES = {
    "file": ("metrics/start*.jsonl", "metrics.jsonl"),
    "tensorboard": ("tensorboard/events.out.tfevents.*", "events.out.tfevents.*"),
    "wandb": ("wandb/*run-*/run-*.wandb", "run-*.wandb"),
}


# ---- faults

START = 5  # number of first steps whose mean is a metric's start
GRADIENT_SPIKE = 10  # times the median of earlier norms; Adam's second moment remembers a spike for many steps
BEFORE = 20  # maximum number of earlier steps in that median
ENTROPY_LEFT = 0.1  # share of the start's entropy; below it responses hardly differ, and groups give no signal
REWARD_LEFT = 0.5  # share of the best reward; rewards are measured from the lowest reward of any response
SMOOTH = 10  # steps per mean of the reward
REWARD_SEEN = 0.1  # share of the range of rewards; a best mean below it comes from few responses
# (metric, lowest and highest healthy value, meaning of other values)
BOUNDS = (
    # Above 0.2, OAR changes fewer than four of five responses.
    ("oar/fallback/any", 0.0, 0.2, "responses that fell back to GRPO"),
    ("oar/answer_found", 0.8, 1.0, "responses with an answer; does algorithm.oar.answer_patterns fit?"),
    # At 0.05, one token in twenty has all the credit.
    ("oar/ess_ratio", 0.05, 1.0, "few tokens hold all credit; lower beta or raise floor"),
    ("oar/lost_responses", 0.0, 0.0, "responses missing from their groups; did a reward function or an engine fail?"),
    ("oar/dump_failed", 0.0, 0.0, "responses that could not be dumped; is the disk full?"),
    ("oar/dashboard_failed", 0.0, 0.0, "a dashboard refused weights and responses; the run's output says why"),
    # A truncated response has no answer and no reward, so the model learns to write less instead of to be right.
    ("response_length/clip_ratio", 0.0, 0.2, "responses at data.max_response_length"),
)
Finding = tuple[int, int, int, str]  # first step, last step, number of steps, what went wrong


def findings(run: RunLog) -> list[list[str]]:
    """Return [steps, description] of each finding, ordered by first step."""
    return [
        [f"{first} to {last}, {number} steps" if number > 1 else str(first), text]
        for first, last, number, text in sorted(_by_metric(run), key=lambda finding: finding[0])
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
    text = f"actor/grad_norm: over {GRADIENT_SPIKE} times the median of up to {BEFORE} earlier steps"
    yield from where(norm > GRADIENT_SPIKE * usual, text)
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
