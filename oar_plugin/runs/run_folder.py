"""The folder of a run: checkpoints, logs, dumps, and `run.yaml` with the settings that the run was started with.

The driver opens it before Ray starts (`KeepRun`), wherever a run starts: after a requeue, on Kubernetes, from verl's own
command line. `oar launch` checks it earlier, where it can see it.
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
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any
from unittest import mock

import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from oar_plugin.hosts.verl.capabilities import host_version
from oar_plugin.output import no_link, say, write_whole
from oar_plugin.runs.plugin import with_new_names

START = "OAR_START"
"""The environment variable that says how to start: `resume`, `fresh` or nothing. `fresh:ID` is fresh at its first start only,
however often a scheduler starts the driver."""
RECORD, LOCK = "run.yaml", "run.lock"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file that names the last complete checkpoint."""
PLACES = ("OAR_DATA", "OAR_CHECKPOINTS", "OAR_SMOKE")
"""Environment variables with folders of one machine; settings are compared without their values."""
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
    # The recipes' own keys for paths.
    *("oar_data", "smoke"),
)
"""Keys on which nothing that is learned or measured depends: they neither name a run nor keep it from being resumed."""

_ADVICE = (
    f"--resume (or {START}=resume) goes on from its last checkpoint with the new settings; --fresh (or {START}=fresh) "
    "moves the folder aside and begins again; another trainer.experiment_name is another run"
)
_locks: dict[Path, IO[str]] = {}
"""The open lock files of the folders that this process trains in; it holds them until it ends."""


class RunRefused(ValueError):
    """The folder holds a run with other settings, or another process trains in it. The message says what to do."""


def counts(key: str) -> bool:
    """Return whether anything that a run learns, computes or measures depends on this key."""
    return not any(fnmatch(key, pattern) for pattern in IGNORED)


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return `a.b.c -> value` of the keys that count, the same on every machine and with today's module names."""
    run = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with mock.patch.dict(os.environ, {name: f"${name}" for name in PLACES}):
        plain = OmegaConf.to_container(run, resolve=True)
    assert isinstance(plain, dict)
    kept: dict[str, Any] = json.loads(json.dumps({key: value for key, value in _flat(plain) if counts(key)}))
    return {key: with_new_names(value) for key, value in kept.items()}


def _flat(group: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check(config: DictConfig, start: str = "") -> None:
    """RunRefused: this run would go on in a folder whose run had other settings, or unknown ones."""
    folder, record = _folder(config), _record(_folder(config))
    if start == "resume" or _is_first_start_of_fresh(record, start):
        return
    if not record:
        if config.trainer.resume_mode == "auto" and (folder / TRACKER).is_file():
            reason = f"{folder} holds checkpoints, and no {RECORD} says with which settings they were made:"
            raise RunRefused(f"{reason}\n{_ADVICE}")
        return
    old, new = record["settings"], settings_of(config)
    differing, unmatched = _compared(record, new)
    if unmatched:
        versions = f"{record['versions'] or 'other versions'}, now {_versions()}"
        keys = ", ".join(_first(unmatched))
        say(f"oar: {folder}: started with {versions}; not compared, as one of them has no such key: {keys}", sys.stderr)
    if differing:
        values = [f"  {key}: {json.dumps(old.get(key))} there, {json.dumps(new.get(key))} now" for key in differing]
        raise RunRefused("\n".join([f"{folder} holds a run with other settings:", *_first(values), _ADVICE]))


def begin(config: DictConfig, start: str = "") -> Path | None:
    """Open the folder of a run that starts, and lock it until this process ends.

    With `fresh` an old folder is moved aside; with `resume` the old record is kept under another name.

    Returns:
        The folder; None where the run has finished already.

    Raises:
        RunRefused: the folder holds a run with other settings, or another process trains there.
    """
    check(config, start)
    if has_finished(config, start):
        return None
    folder, settings = _folder(config), settings_of(config)
    record = _record(folder)
    moves = folder.exists() and _is_first_start_of_fresh(record, start)
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
    """Return whether the folder holds a run to go on with."""
    return any((folder / name).is_file() for name in (RECORD, TRACKER))


def has_finished(config: DictConfig, start: str = "") -> bool:
    """Return whether nothing is left to do for this run."""
    record = _record(_folder(config))
    if record.get("state") != "finished" or _is_first_start_of_fresh(record, start):
        return False
    return bool(config.trainer.resume_mode == "auto" and not _compared(record, settings_of(config))[0])


def end(folder: Path, state: str) -> None:
    """Record how a run ended: `finished` or `failed`. A run that was cut off stays `unfinished`."""
    _write(folder, _record(folder) | {"state": state})


def state(folder: Path) -> str:
    """Return `not started`, `unfinished`, `failed` or `finished`."""
    return str(_record(folder).get("state", "not started"))


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables that put verl's loggers into the folder, with a new metrics file for each start."""
    files = folder / "metrics"
    files.mkdir(parents=True, exist_ok=True)
    place = {
        "VERL_FILE_LOGGER_PATH": str(unused(files / "start.jsonl")),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
    }
    return {name: value for name, value in place.items() if name not in os.environ}


def mean_accuracy(metrics: Mapping[str, Any]) -> float | None:
    """Return the mean over the validation sets of verl's `val-core/SET/acc/mean@K` (or `reward`); None without validation."""
    sets = [float(value) for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name]
    return sum(sets) / len(sets) if sets else None


def _folder(config: DictConfig) -> Path:
    return Path(str(config.trainer.default_local_dir)).absolute()


def _record(folder: Path) -> dict[str, Any]:
    """Return the content of `run.yaml`, empty where no run was started."""
    file = folder / RECORD
    try:
        record = yaml.safe_load(file.read_text(encoding="utf-8"))
        settings = {key: with_new_names(value) for key, value in dict(record["settings"]).items()}
        texts = {"state": str(record["state"]), "start": str(record["start"])}
        return {**texts, "versions": str(record.get("versions", "")), "settings": settings}
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"{file}: not what a run writes ({type(error).__name__}); move it away") from error


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    write_whole(folder / RECORD, yaml.safe_dump(dict(record), sort_keys=False))


def _lock(folder: Path) -> None:
    """Keep other processes out, on other machines too where the file system has such locks.

    Raises:
        RunRefused: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder in _locks:
        _locks.pop(folder).close()
    file = open(folder / LOCK, "a+", encoding="utf-8", opener=no_link)  # noqa: SIM115  stays open until the process ends
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
    """Return the versions of the packages that give a configuration its keys."""
    try:
        ours = importlib.metadata.version("oar_plugin")
    except importlib.metadata.PackageNotFoundError:
        ours = "not installed"  # imported through PYTHONPATH
    return f"verl {host_version()}, oar_plugin {ours}"


def _compared(record: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the keys whose values differ, and those not compared because another version has added or removed them."""
    old = record["settings"]
    unmatched = [] if record["versions"] == _versions() else sorted(old.keys() ^ new.keys())
    keys = (old.keys() | new.keys()) - set(unmatched)
    return sorted(key for key in keys if old.get(key) != new.get(key)), unmatched


def _first(lines: Sequence[str]) -> list[str]:
    return [*lines[:SHOWN], *([f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]


def _is_first_start_of_fresh(record: Mapping[str, Any], start: str) -> bool:
    return start.startswith("fresh") and (start == "fresh" or record.get("start") != start)


def unused(path: Path) -> Path:
    """Return `path`, or where it exists `folder.N` or `file.N.suffix` with the first free number."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.with_name(f"{stem}.{number}{suffix}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


class KeepRun(Callback):
    """Hydra's callback of the recipes: opens `trainer.default_local_dir` and puts verl's loggers there.

    It refuses to go on there with other settings than those the run was started with.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Open the folder. Exits with status 2 where that is refused, with 0 where the run has finished already."""
        try:
            opened = begin(config, os.environ.get(START, ""))
        except (RunRefused, OSError) as error:
            say(f"oar: {error}", sys.stderr)
            sys.exit(2)
        except Exception:  # Hydra would log it and go on without the folder
            traceback.print_exc()
            sys.exit(1)
        if opened is None:
            say(f"oar: {config.trainer.default_local_dir}: this run has finished; --fresh begins again", sys.stderr)
            sys.exit(0)
        # In Ray's environment, not in this process's: the logger is in an actor, and Ray may run already.
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", variables(opened), force_add=True)
        OmegaConf.set_struct(config.ray_kwargs.ray_init.runtime_env, False)  # verl 0.9.0 adds a variable there itself

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record how the run ended. A run that is cut off does not get here."""
        end(_folder(config), "finished" if job_return.status is JobStatus.COMPLETED else "failed")
