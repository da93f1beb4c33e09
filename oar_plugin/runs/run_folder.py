"""The folder of a run: checkpoints, logs, dumps, and `run.yaml`, which records the settings of the run's last start.

The driver opens the folder before Ray starts, through Hydra's callback `KeepRun`, however a run is started: by `oar launch`,
which also checks the folder in advance if it sees it, by a scheduler that restarts it, or with verl's own command line.
"""

import errno
import fcntl
import itertools
import json
import os
import re
import sys
import traceback
from fnmatch import translate
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, flag_override

from oar_plugin.config import GROUPS, LEFT_DEFAULTS, PREFIX, OarConfig
from oar_plugin.hosts.verl.settings import draw_seed
from oar_plugin.output import say, write_whole
from oar_plugin.runs.recipe import flat

START = "OAR_START"  # environment variable: `resume` continues a run whose settings have changed
RECORD, LOCK = "run.yaml", "run.lock"
PLACES = ("OAR_DATA", "OAR_CHECKPOINTS", "OAR_SMOKE")
"""Environment variables that hold folders of one machine. Recorded settings contain `$NAME` instead of the value."""
_IGNORED = yaml.safe_load(Path(__file__).with_name("ignored_keys.yaml").read_text(encoding="utf-8"))
_OARS = {key: field.default for key, field in OarConfig.model_fields.items()} | LEFT_DEFAULTS
for _group, _model in GROUPS.items():
    _OARS |= {_group: {}, **{f"{_group}.{key}": field.default for key, field in _model.model_fields.items()}}
_DEFAULTS: dict[str, Any] = {PREFIX: {}, **{f"{PREFIX}.{key}": value for key, value in _OARS.items()}}
"""What a key of OAR's settings is where it is missing: another version recorded the run, and keys leave and are added."""
_BEFORE = {"amortize.share": None, "amortize.units": None, "perturbation.replacement": "pad"}
"""Defaults that are others since version 0.4.0, with that of `importance`. Records of that version have `_MARK`."""
_MARK = f"{PREFIX}.amortize.units"
_changes_nothing = re.compile("|".join(map(translate, _IGNORED))).match
_ADVICE = f"--resume (or {START}=resume) continues from the last checkpoint with the new settings; move the folder away"
_ADVICE += " to start over; another name (--name, trainer.experiment_name) starts a separate run"
_locks: dict[Path, int] = {}  # folder -> descriptor of its lock file, which stays open until this process ends


class RunRefused(ValueError):
    """The run must not start in this folder. The message gives the reason and says what to do."""


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return `a.b.c -> value` for all keys that affect results. The values are the same on every machine."""
    run = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with mock.patch.dict(os.environ, {name: f"${name}" for name in PLACES}):
        plain: Any = OmegaConf.to_container(run, resolve=True)
    return dict(json.loads(json.dumps({key: value for key, value in flat(plain) if not _changes_nothing(key)})))


def only_validates(config: DictConfig) -> str:
    """Return what a run with `trainer.val_only=True` validates, "" for one that trains. RunRefused: verl would train."""
    trainer, latest = config.trainer, _folder(config) / "latest_checkpointed_iteration.txt"  # as verl finds it
    if not trainer.get("val_only"):
        return ""
    if not trainer.val_before_train:
        raise RunRefused("trainer.val_before_train=False with trainer.val_only=True: verl would train; allowed: True")
    if trainer.resume_mode == "resume_path":
        return f"the checkpoint {trainer.resume_from_path}"
    if trainer.resume_mode == "auto" and latest.is_file():
        return f"the checkpoint {latest.with_name('global_step_')}{latest.read_text(encoding='utf-8').strip()}"
    return f"the untrained model {config.actor_rollout_ref.model.path}, without a checkpoint of {latest.parent}"


def check(config: DictConfig, start: str = "") -> bool:
    """Return whether the folder's run has finished with the same settings, so that starting it again would do nothing.

    Raise RunRefused if the folder's run had other settings and this one trains. `start` is the value of `OAR_START`.
    """
    callback = str(config.trainer.get("checkpoint_callback_class"))
    if callback.startswith("oar_plugin.runs.best_checkpoint"):
        instead = "leave it out: trainer.max_actor_ckpt_to_keep says how many checkpoints verl keeps"
        raise RunRefused(f"trainer.checkpoint_callback_class={callback}: was removed in oar_plugin 0.4.0; {instead}")
    if only_validates(config):
        return False
    record = record_of(folder := _folder(config))
    _keep_default(record, config)
    differing = _differences(record, config)
    if differing and start != "resume":
        values = [f"  {key}: {json.dumps(old)} there, {json.dumps(new)} now" for key, (old, new) in differing.items()]
        raise RunRefused("\n".join([f"{folder} holds a run with other settings:", *values, _ADVICE]))
    return bool(config.trainer.resume_mode == "auto" and record.get("state") == "finished" and not differing)


def _keep_default(record: dict[str, Any], config: DictConfig) -> None:
    """Let a run of an older version go on with the importance that it recorded, if `config` has the new default."""
    asked = {key: OmegaConf.select(config, f"{PREFIX}.{key}") for key in ("importance", *_BEFORE)}
    kept = [key for key, value in asked.items() if value == _OARS[key]]
    if record.get("older") and kept[-len(_BEFORE) :] == [*_BEFORE]:  # `importance` may be named
        old = {key: record["settings"][f"{PREFIX}.{key}"] for key in kept}
        with flag_override(config, ["readonly", "struct"], False):
            for key, value in old.items():
                OmegaConf.update(config, f"{PREFIX}.{key}", value)
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in old.items())
        said += f" (the new one: {PREFIX}.amortize.share=0.025)"
        say(f"oar: this run began with the default of an older version and goes on with it: {said}", sys.stderr)


def _differences(record: dict[str, Any], config: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Return key -> recorded and new value where they differ, sorted; nothing if there is no record."""
    new = settings_of(config)
    old = record.get("settings", new)
    both = {key: tuple(of.get(key, _DEFAULTS.get(key)) for of in (old, new)) for key in sorted(old.keys() | new.keys())}
    return {key: (there, now) for key, (there, now) in both.items() if there != now}


def begin(config: DictConfig, start: str = "") -> Path | None:
    """Open a run's folder, write `run.yaml` if it trains, and lock the folder until this process ends.

    If the recorded settings differ, the old `run.yaml` is renamed. Return the folder, or None if the run has already finished.
    Raise RunRefused as `check` does, or if another process trains there.
    """
    if check(config, start):
        return None
    folder = _folder(config)
    _lock(folder)
    if only_validates(config):
        return folder
    if _differences(record_of(folder), config):
        (folder / RECORD).rename(free_path(folder / RECORD))
    settings = settings_of(config)
    if record_of(folder).get("older") and settings.get(_MARK, "") is None:
        del settings[_MARK]  # the next start goes on as well
    record = {"state": "unfinished", "settings": settings}
    write_whole(folder / RECORD, yaml.safe_dump(record, sort_keys=False))
    return folder


def end(folder: Path, state: str) -> None:
    """Record how a run ended: `finished` or `failed`. A run that was killed remains `unfinished`."""
    record = record_of(folder)
    record.pop("older", None)
    write_whole(folder / RECORD, yaml.safe_dump(record | {"state": state}, sort_keys=False))


def _folder(config: DictConfig) -> Path:
    return Path(str(config.trainer.default_local_dir)).absolute()


def record_of(folder: Path) -> dict[str, Any]:
    """Return the content of `run.yaml`, or an empty dict if there is none. Raise RunRefused if it is not valid."""
    file = folder / RECORD
    try:
        record = yaml.safe_load(file.read_text(encoding="utf-8"))
        settings = dict(record["settings"]).items()  # an older version has recorded more of them
        kept = {k: v for k, v in settings if not _changes_nothing(k)}
        older = f"{PREFIX}.importance" in kept and _MARK not in kept
        before = {f"{PREFIX}.{key}": value for key, value in _BEFORE.items()} if older else {}
        return {"state": str(record["state"]), "settings": before | kept, "older": older}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"{file}: not a valid {RECORD} ({type(error).__name__}); move it away") from error


def _lock(folder: Path) -> None:
    """Lock the folder, also on other machines if the file system supports it. RunRefused: another process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder in _locks:
        os.close(_locks.pop(folder))
    lock = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        advice = f"wait for it or end it; if its machine is gone but the lock remains, delete {folder / LOCK}"
        raise RunRefused(f"{folder}: another process trains there; {advice}") from None
    except OSError as error:  # some clusters' file systems have no locks: there it stays unlocked
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    _locks[folder] = lock


def free_path(path: Path) -> Path:
    """Return `path` if there is no such file, else `file.N.suffix` with the smallest free number."""
    numbered = (path.with_stem(f"{path.stem}.{number}") for number in itertools.count(1))
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
        draw_seed(config)  # the folder's record has null, as the next start will
        if validated := only_validates(config):
            say(f"oar: validates {validated}", sys.stderr)
        (opened / "metrics").mkdir(exist_ok=True)
        metrics = free_path(opened / "metrics" / "start.jsonl")  # verl's file logger would empty the last start's
        places = {"VERL_FILE_LOGGER_PATH": str(metrics), "TENSORBOARD_DIR": str(opened / "tensorboard")}
        variables = {name: value for name, value in places.items() if name not in os.environ}
        # Set in Ray's runtime_env: the loggers run in an actor, and a running Ray ignores this process's environment.
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", variables, force_add=True)
        OmegaConf.set_struct(config.ray_kwargs.ray_init.runtime_env, False)  # verl 0.9.0 adds its own variable

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record how training ended. Hydra does not call this if the process is killed."""
        if not only_validates(config):
            end(_folder(config), "finished" if job_return.status is JobStatus.COMPLETED else "failed")
