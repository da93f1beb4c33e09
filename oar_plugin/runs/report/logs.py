"""Reads a run's metrics from the files of verl's own loggers: `file`, `tensorboard`, `wandb` (offline)."""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from oar_plugin.output import printable
from oar_plugin.runs.plugin import with_new_names

Row = tuple[int, dict[str, float]]  # step and metrics

SECONDS = "timing_s/step"


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

    Raise NoLogs if there is none, or if run.yaml was not written by a run. Raise ModuleNotFoundError if PyYAML or the logger's
    package is missing.
    """
    path = path.absolute()
    kind, files = _logs(path)
    settings: dict[str, Any] = {}
    steps, resumed = _merged(READERS[kind](file, settings) for file in files)
    if not steps:
        raise NoLogs(f"{path}: no step in it; verl's logger {kind!r} writes each step when it ends")
    state = ""
    if (record := path / "run.yaml").is_file():
        import yaml

        try:
            run = yaml.safe_load(record.read_text(encoding="utf-8"))
            state, settings = (
                str(run["state"]),
                {key: with_new_names(each) for key, each in dict(run["settings"]).items()},
            )
        except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise NoLogs(f"{record}: not a valid run.yaml ({type(error).__name__}); move it away") from error
    metrics = pd.DataFrame.from_dict(steps, orient="index").sort_index()
    return RunLog(path.stem if path.is_file() else path.name, kind, len(files), metrics, resumed, settings, state)


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
    raise NoLogs(f"{path}: no logs of verl, looked for {places}; set trainer.logger=[console,file] to write them")


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
        for name, value in config.items():
            settings.update(_flat(name, value))
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
    return {
        name: _number(value)
        for name, value in row.items()
        if not name.startswith("_") and isinstance(value, int | float | None)
    }


def _number(value: float | None) -> float:
    """Return the value, or inf if it is not finite; verl's file logger writes nan and inf as JSON's null."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:  # Python's integers are unbounded
        return math.inf
    return math.inf if math.isnan(number) else number


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _flat(f"{name}.{key}", below)
    elif not name.startswith("_"):
        yield name, value


READERS = {"file": _of_file, "tensorboard": _of_tensorboard, "wandb": _of_wandb}
# Logger -> patterns of its files, in a run's folder or in the folder that the logger wrote.
PLACES = {
    "file": ("metrics/start*.jsonl", "metrics.jsonl"),
    "tensorboard": ("tensorboard/events.out.tfevents.*", "events.out.tfevents.*"),
    "wandb": ("wandb/*run-*/run-*.wandb", "run-*.wandb"),
}
