"""The folder of a run: checkpoints, logs, dumps, and `run.yaml`, which records the settings of the run's last start.

The driver opens the folder before Ray starts, through Hydra's callback `KeepRun`. This works however a run is started: by
`oar launch`, by a scheduler that restarts it, or with verl's own command line. `oar launch` also checks the folder in advance
if it can see it.
"""

import itertools
import json
import os
import sys
import traceback
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any
from unittest import mock

import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from oar_plugin.output import locked, no_link, say, write_whole
from oar_plugin.runs.recipe import flat

START = "OAR_START"
"""Environment variable: `resume` continues a run whose settings have changed."""
RECORD, LOCK = "run.yaml", "run.lock"
PLACES = ("OAR_DATA", "OAR_CHECKPOINTS", "OAR_SMOKE")
"""Environment variables that hold folders of one machine. Recorded settings contain `$NAME` instead of the value."""
_IGNORED = yaml.safe_load(Path(__file__).with_name("ignored_keys.yaml").read_text(encoding="utf-8"))
_ADVICE = (
    f"--resume (or {START}=resume) continues from the last checkpoint with the new settings; move the folder away to start "
    "over; another name (--name, trainer.experiment_name) starts a separate run"
)
_locks: dict[Path, IO[str]] = {}
"""Folder -> its open lock file. This process holds the locks until it ends."""


class RunRefused(ValueError):
    """The run must not start in this folder. The message gives the reason and says what to do."""


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return `a.b.c -> value` for all keys that affect results. The values are the same on every machine."""
    run = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with mock.patch.dict(os.environ, {name: f"${name}" for name in PLACES}):
        plain: Any = OmegaConf.to_container(run, resolve=True)
    # A key that matches a pattern changes no result.
    kept = {key: value for key, value in flat(plain) if not any(fnmatch(key, pattern) for pattern in _IGNORED)}
    return dict(json.loads(json.dumps(kept)))


def check(config: DictConfig, start: str = "") -> None:
    """Raise RunRefused if the folder's run had other settings. `start` is the value of `OAR_START`."""
    folder, new = _folder(config), settings_of(config)
    old = record_of(folder).get("settings", new)
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if differing and start != "resume":
        values = [f"  {key}: {json.dumps(old.get(key))} there, {json.dumps(new.get(key))} now" for key in differing]
        raise RunRefused("\n".join([f"{folder} holds a run with other settings:", *values, _ADVICE]))


def has_finished(config: DictConfig) -> bool:
    """Return whether the folder's run has finished with the same settings, so that starting it again would do nothing."""
    record = {"state": "finished", "settings": settings_of(config)}
    return bool(config.trainer.resume_mode == "auto" and record_of(_folder(config)) == record)


def begin(config: DictConfig, start: str = "") -> Path | None:
    """Open a run's folder, write `run.yaml`, and lock the folder until this process ends.

    If the recorded settings differ, the old `run.yaml` is renamed. Return the folder, or None if the run has already finished.
    Raise RunRefused as `check` does, or if another process trains there.
    """
    check(config, start)
    if has_finished(config):
        return None
    folder, settings = _folder(config), settings_of(config)
    _lock(folder)
    if record_of(folder).get("settings", settings) != settings:
        (folder / RECORD).rename(free_path(folder / RECORD))
    write_whole(folder / RECORD, yaml.safe_dump({"state": "unfinished", "settings": settings}, sort_keys=False))
    return folder


def end(folder: Path, state: str) -> None:
    """Record how a run ended: `finished` or `failed`. A run that was killed remains `unfinished`."""
    write_whole(folder / RECORD, yaml.safe_dump(record_of(folder) | {"state": state}, sort_keys=False))


def _folder(config: DictConfig) -> Path:
    return Path(str(config.trainer.default_local_dir)).absolute()


def record_of(folder: Path) -> dict[str, Any]:
    """Return the content of `run.yaml`, or an empty dict if there is none. Raise RunRefused if it is not valid."""
    file = folder / RECORD
    try:
        record = yaml.safe_load(file.read_text(encoding="utf-8"))
        return {"state": str(record["state"]), "settings": dict(record["settings"])}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"{file}: not a valid {RECORD} ({type(error).__name__}); move it away") from error


def _lock(folder: Path) -> None:
    """Lock the folder, also on other machines if the file system supports it. RunRefused: another process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder in _locks:
        _locks.pop(folder).close()
    file = open(folder / LOCK, "a", encoding="utf-8", opener=no_link)  # noqa: SIM115  stays open until the process ends
    if not locked(file):
        file.close()
        advice = f"wait for it or end it; if its machine is gone but the lock remains, delete {file.name}"
        raise RunRefused(f"{folder}: another process trains there; {advice}")
    _locks[folder] = file


def free_path(path: Path) -> Path:
    """Return `path` if it does not exist, else `folder.N` or `file.N.suffix` with the smallest free number."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.with_name(f"{stem}.{number}{suffix}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


class KeepRun(Callback):
    """Hydra callback of the recipes: opens `trainer.default_local_dir` and makes verl's loggers write there."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Open the folder. Exit with status 2 if it cannot be used, 1 after other errors, 0 if the run has already finished."""
        try:
            opened = begin(config, os.environ.get(START, ""))
        except (RunRefused, OSError) as error:
            say(f"oar: {error}", sys.stderr)
            sys.exit(2)
        except Exception:  # Hydra would only log the error and continue without the folder
            traceback.print_exc()
            sys.exit(1)
        if opened is None:
            say(f"oar: {_folder(config)}: this run has finished; move the folder away to start it again", sys.stderr)
            sys.exit(0)
        (opened / "metrics").mkdir(exist_ok=True)
        metrics = free_path(opened / "metrics" / "start.jsonl")  # verl's file logger would empty the last start's
        places = {"VERL_FILE_LOGGER_PATH": str(metrics), "TENSORBOARD_DIR": str(opened / "tensorboard")}
        variables = {name: value for name, value in places.items() if name not in os.environ}
        # Set in Ray's runtime_env: the loggers run in an actor, and a running Ray ignores this process's environment.
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", variables, force_add=True)
        OmegaConf.set_struct(config.ray_kwargs.ray_init.runtime_env, False)  # verl 0.9.0 adds its own variable

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record how the run ended. Hydra does not call this if the process is killed."""
        end(_folder(config), "finished" if job_return.status is JobStatus.COMPLETED else "failed")
