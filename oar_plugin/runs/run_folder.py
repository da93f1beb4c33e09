"""The folder of a run: checkpoints, logs, dumps, and in `run.yaml` the settings that it was started with.

The driver opens it before Ray starts (`KeepRun`), so that this holds wherever a run starts: after a requeue, on
Kubernetes, from verl's own command line. `oar launch` looks into it earlier, where it can see it.
"""

import errno
import fcntl
import importlib.metadata
import itertools
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Literal
from unittest import mock

import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from oar_plugin.hosts.verl.capabilities import host_version
from oar_plugin.output import no_link, say, write_whole

START = "OAR_START"
"""The environment variable that says how to start: `resume`, or `fresh`, or `fresh:ID`, which is fresh once however often the
driver is started, or nothing."""
RECORD, LOCK = "run.yaml", "run.lock"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's: names the last complete checkpoint."""
PLACES = ("OAR_DATA", "OAR_CHECKPOINTS", "OAR_SMOKE")
"""Where files lie on a machine says nothing about what is in them."""
SHOWN = 12
IGNORED = (
    # Where a run writes, and what it reports.
    *("trainer.project_name", "trainer.experiment_name", "trainer.default_*_dir", "trainer.*_data_dir", "hydra.*"),
    *("trainer.logger", "trainer.log_*", "algorithm.oar.dump.*", "global_profiler*", "*.profiler.*"),
    # When it saves and validates.
    *("trainer.save_freq", "trainer.test_freq", "trainer.val_before_train", "trainer.esi_*"),
    *("trainer.max_*_ckpt_to_keep", "trainer.checkpoint_*", "actor_rollout_ref.actor.checkpoint.*"),
    # Which processes work for it.
    *("ray_kwargs*", "transfer_queue*", "*.num_workers", "*.dataloader_num_workers", "actor_rollout_ref.nccl_timeout"),
    # The recipes' own, for paths.
    *("oar_data", "smoke"),
)
"""Keys that neither name a run nor keep it from being resumed, because nothing that is learned or measured depends on them."""

State = Literal["not started", "unfinished", "failed", "finished"]


_locks: dict[Path, IO[str]] = {}
"""Open files of the folders that this process trains in: they are locked for as long as it lives."""


class RunRefused(ValueError):
    """The folder holds a run with other settings, or one that is training. The message says what to do."""


def counts(key: str) -> bool:
    """Whether what a run learns, how it is computed, or what is measured of it depends on this key."""
    return not any(fnmatch(key, pattern) for pattern in IGNORED)


def settings_of(config: DictConfig) -> dict[str, Any]:
    """`a.b.c -> value` of what a run learns and measures, as it is on every machine."""
    run = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with mock.patch.dict(os.environ, {name: f"${name}" for name in PLACES}):
        plain = OmegaConf.to_container(run, resolve=True)
    assert isinstance(plain, dict)
    kept: dict[str, Any] = json.loads(json.dumps({key: value for key, value in _flat(plain) if counts(key)}))
    return kept


def _flat(group: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check(config: DictConfig, start: str = "") -> None:
    """RunRefused: this run would go on in a folder of one with other settings, or with settings that nothing says."""
    folder, record = _folder(config), _record(_folder(config))
    if start == "resume" or _is_first_start_of_fresh(record, start):
        return
    advice = (
        f"--resume (or {START}=resume) goes on from its last checkpoint with the new settings; --fresh (or {START}=fresh) "
        "moves the folder aside and begins again; another trainer.experiment_name is another run"
    )
    if not record:
        if config.trainer.resume_mode == "auto" and (folder / TRACKER).is_file():
            raise RunRefused(
                f"{folder} holds checkpoints, and no {RECORD} says with which settings they were made:\n{advice}"
            )
        return
    old, new = record["settings"], settings_of(config)
    if unmatched := _unmatched(record, new):
        names = ", ".join(unmatched[:SHOWN]) + (f" and {len(unmatched) - SHOWN} more" if len(unmatched) > SHOWN else "")
        versions = f"{record['versions'] or 'other versions'}, now {_versions()}"
        say(
            f"oar: {folder}: started with {versions}; not compared, as one of them has no such key: {names}", sys.stderr
        )
    if not (keys := _differing(record, new)):
        return
    lines = [f"  {key}: {json.dumps(old.get(key))} there, {json.dumps(new.get(key))} now" for key in keys[:SHOWN]]
    more = [f"  and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    raise RunRefused("\n".join([f"{folder} holds a run with other settings:", *lines, *more, advice]))


def begin(config: DictConfig, start: str = "") -> Path | None:
    """Open the folder of a run that starts, and lock it for the life of this process; None where the run has finished already.

    RunRefused: it holds a run with other settings, or another process trains there. With `fresh` what is there is moved aside;
    with `resume` its record is kept under another name.
    """
    check(config, start)
    folder = _folder(config)
    record, settings = _record(folder), settings_of(config)
    moves = folder.exists() and _is_first_start_of_fresh(record, start)
    if not moves and _has_finished(record, settings, config):
        return None
    if start == "resume" and not is_begun(folder):
        say(f"oar: {folder}: {START}=resume, but no run is there; it begins at step 0", sys.stderr)
    _lock(folder)
    if moves:
        folder.rename(unused(folder))
        _lock(folder)
        record = {}
    if record and record["settings"] != settings:
        (folder / RECORD).rename(unused(folder / RECORD))
    began = start if start.startswith("fresh") else record.get("start", "")
    _write(folder, {"state": "unfinished", "start": began, "versions": _versions(), "settings": settings})
    return folder


def is_begun(folder: Path) -> bool:
    """Whether there is a run to go on with."""
    return any((folder / name).is_file() for name in (RECORD, TRACKER))


def has_finished(config: DictConfig, start: str = "") -> bool:
    """Whether nothing is left to do of this run."""
    record = _record(_folder(config))
    return not _is_first_start_of_fresh(record, start) and _has_finished(record, settings_of(config), config)


def end(folder: Path, state: State) -> None:
    """Note how a run ended. One that was cut off stays unfinished."""
    _write(folder, _record(folder) | {"state": state})


def variables(folder: Path) -> dict[str, str]:
    """Where verl's loggers write. Each start has a file of its own, because verl writes it anew."""
    files = folder / "metrics"
    files.mkdir(parents=True, exist_ok=True)
    place = {
        "VERL_FILE_LOGGER_PATH": str(unused(files / "start.jsonl")),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
    }
    return {name: value for name, value in place.items() if name not in os.environ}


@dataclass(frozen=True)
class Progress:
    """How far a run is: `accuracy` is the mean over the validation sets, by step."""

    state: State
    step: int
    accuracy: dict[int, float]


def progress(folder: Path) -> Progress:
    """As its folder says; `not started` where there is none."""
    record = _record(folder)
    steps: dict[int, dict[str, Any]] = {}
    for file in sorted((folder / "metrics").glob("start*.jsonl"), key=lambda file: (len(file.name), file.name)):
        rows = list(_rows(file))
        # A start goes on from a checkpoint: what an earlier one did after it is done again.
        steps = {step: data for step, data in steps.items() if not rows or step <= rows[0]["step"]}
        for row in rows:
            steps[row["step"]] = steps.get(row["step"], {}) | row["data"]
    validated = {step: accuracy for step, data in steps.items() if (accuracy := mean_accuracy(data)) is not None}
    return Progress(record.get("state", "not started"), max(steps, default=0), validated)


def mean_accuracy(metrics: Mapping[str, Any]) -> float | None:
    """Of a step's validation, over its sets: verl's `val-core/SET/acc/mean@K` (or `reward`). None where it had none."""
    found = [float(value) for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name]
    return sum(found) / len(found) if found else None


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the run was cut off, or is writing it
            return


def _folder(config: DictConfig) -> Path:
    return Path(str(config.trainer.default_local_dir)).absolute()


def _record(folder: Path) -> dict[str, Any]:
    """Empty where no run was started."""
    file = folder / RECORD
    try:
        record = yaml.safe_load(file.read_text(encoding="utf-8"))
        texts = {name: str(record[name]) for name in ("state", "start")}
        return {**texts, "versions": str(record.get("versions", "")), "settings": dict(record["settings"])}
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"{file}: not what a run writes ({type(error).__name__}); move it away") from error


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    write_whole(folder / RECORD, yaml.safe_dump(dict(record), sort_keys=False))


def _lock(folder: Path) -> None:
    """Keep other processes out, on other machines too where the file system has such locks; RunRefused: one is in there."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder in _locks:
        _locks.pop(folder).close()
    file = open(folder / LOCK, "a+", encoding="utf-8", opener=no_link)  # noqa: SIM115  open, and locked, as long as this process
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            advice = f"wait, or end it; if its machine is gone, and its lock is not, delete {file.name}"
            raise RunRefused(f"{folder}: another process trains there: {file.read()}; {advice}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    file.truncate(0)
    print(f"host {socket.gethostname()}, pid {os.getpid()}", end="", file=file, flush=True)
    _locks[folder] = file


def _versions() -> str:
    """Of what gives a configuration its keys."""
    try:
        ours = importlib.metadata.version("oar_plugin")
    except importlib.metadata.PackageNotFoundError:
        ours = "not installed"  # found by PYTHONPATH
    return f"verl {host_version()}, oar_plugin {ours}"


def _differing(record: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Keys whose values are not those of the record; of other versions only keys that both have."""
    old = record["settings"]
    keys = (old.keys() | settings.keys()) - set(_unmatched(record, settings))
    return sorted(key for key in keys if old.get(key) != settings.get(key))


def _unmatched(record: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Keys that another version has added or taken away."""
    return [] if record["versions"] == _versions() else sorted(record["settings"].keys() ^ settings.keys())


def _is_first_start_of_fresh(record: Mapping[str, Any], start: str) -> bool:
    return start.startswith("fresh") and (start == "fresh" or record.get("start") != start)


def _has_finished(record: Mapping[str, Any], settings: Mapping[str, Any], config: DictConfig) -> bool:
    resumes = config.trainer.resume_mode == "auto"
    return resumes and record.get("state") == "finished" and not _differing(record, settings)


def unused(path: Path) -> Path:
    """`path`, or with the first number that makes it one that is not there: `folder.1`, `file.1.suffix`."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.with_name(f"{stem}.{number}{suffix}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


class KeepRun(Callback):
    """Opens the folder of a recipe's run, `trainer.default_local_dir`, and puts verl's loggers there.

    Refuses to go on there with other settings than the run was started with.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See `Callback`. Exits with status 2 where it refuses, with 0 where nothing is left to do."""
        try:
            opened = begin(config, os.environ.get(START, ""))
        except (RunRefused, OSError) as error:
            say(f"oar: {error}", sys.stderr)
            sys.exit(2)
        except Exception:  # Hydra would go on without it
            traceback.print_exc()
            sys.exit(1)
        if opened is None:
            say(f"oar: {config.trainer.default_local_dir}: this run has finished; --fresh begins again", sys.stderr)
            sys.exit(0)
        # In Ray's environment, not in this process's: the logger is in an actor, and Ray may run already.
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", variables(opened), force_add=True)
        OmegaConf.set_struct(config.ray_kwargs.ray_init.runtime_env, False)  # verl 0.9.0 adds a variable there itself

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """See `Callback`. A run that is cut off does not get here."""
        state: State = "finished" if job_return.status is JobStatus.COMPLETED else "failed"
        end(Path(str(config.trainer.default_local_dir)).absolute(), state)
