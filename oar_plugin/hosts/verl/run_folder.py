"""The folder of a run: checkpoints, logs, dumps, and in `run.yaml` the settings that it was started with.

The driver opens it before Ray starts (`hydra_conf.KeepRun`), so that this holds wherever a run starts: after a requeue, on
Kubernetes, from verl's own command line. `oar launch` looks into it earlier, where it can see it.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import yaml
from omegaconf import DictConfig, OmegaConf

START = "OAR_START"
"""The environment variable that says how to start: `resume`, or `fresh`, or `fresh:ID`, which is fresh once however often the
driver is started, or nothing."""
RECORD = "run.yaml"
PLACES = ("OAR_DATA", "OAR_CHECKPOINTS", "OAR_SMOKE")
"""Where files lie on a machine says nothing about what is in them."""
SHOWN = 12
NOT_LEARNED = (
    # Where a run writes, and what it reports.
    *("trainer.project_name", "trainer.experiment_name", "trainer.default_*_dir", "trainer.*_data_dir", "hydra.*"),
    *("trainer.logger", "trainer.log_*", "algorithm.oar.dump_*", "global_profiler*"),
    # When it saves and validates.
    *("trainer.save_freq", "trainer.test_freq", "trainer.val_before_train", "trainer.resume_*", "trainer.esi_*"),
    *("trainer.max_*_ckpt_to_keep", "trainer.checkpoint_*", "actor_rollout_ref.actor.checkpoint.*"),
    # Which processes work for it.
    *("ray_kwargs*", "transfer_queue*", "*.num_workers", "*.dataloader_num_workers", "actor_rollout_ref.nccl_timeout"),
    # The recipes' own, for paths.
    *("oar_data", "smoke"),
)
"""Keys that neither name a run nor keep it from being resumed, because nothing that is learned or measured depends on them."""

State = Literal["not started", "unfinished", "failed", "finished"]


class RunRefused(ValueError):
    """The folder holds a run with other settings. The message says which, and what to do."""


def is_learned(key: str) -> bool:
    """Whether what a run learns, or what is measured of it, depends on this key."""
    return not any(fnmatch(key, pattern) for pattern in NOT_LEARNED)


def settings_of(config: DictConfig) -> dict[str, Any]:
    """`a.b.c -> value` of what a run learns and measures, as it is on every machine."""
    run = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with mock.patch.dict(os.environ, {name: f"${name}" for name in PLACES}):
        plain = OmegaConf.to_container(run, resolve=True)
    assert isinstance(plain, dict)
    kept: dict[str, Any] = json.loads(json.dumps({key: value for key, value in _flat(plain) if is_learned(key)}))
    return kept


def _flat(group: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check(config: DictConfig, start: str = "") -> None:
    """RunRefused: this run would go on in a folder of one with other settings."""
    folder, record = _folder(config), _record(_folder(config))
    if not record or _begins_again(record, start) or start == "resume":
        return
    old, new = record["settings"], settings_of(config)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if not keys:
        return
    lines = [f"  {key}: {json.dumps(old.get(key))} there, {json.dumps(new.get(key))} now" for key in keys[:SHOWN]]
    more = [f"  and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    advice = (
        f"--resume (or {START}=resume) goes on from its last checkpoint with the new settings; --fresh (or {START}=fresh) "
        "moves the folder aside and begins again; another trainer.experiment_name is another run"
    )
    raise RunRefused("\n".join([f"{folder} holds a run with other settings:", *lines, *more, advice]))


def begin(config: DictConfig, start: str = "") -> Path | None:
    """Open the folder of a run that starts; None where the run has finished already.

    RunRefused: it holds a run with other settings. With `fresh` what is there is moved aside; with `resume` its record is kept
    under another name.
    """
    check(config, start)
    folder = _folder(config)
    record, settings = _record(folder), settings_of(config)
    if folder.exists() and _begins_again(record, start):
        folder.rename(_free(folder))
        record = {}
    if _has_finished(record, settings, config):
        return None
    if record and record["settings"] != settings:
        (folder / RECORD).rename(_free(folder / RECORD))
    began = start if start.startswith("fresh") else record.get("start", "")
    _write(folder, {"state": "unfinished", "start": began, "settings": settings})
    return folder


def has_finished(config: DictConfig, start: str = "") -> bool:
    """Whether nothing is left to do of this run."""
    record = _record(_folder(config))
    return not _begins_again(record, start) and _has_finished(record, settings_of(config), config)


def end(folder: Path, state: State) -> None:
    """Note how a run ended. One that was cut off stays unfinished."""
    _write(folder, _record(folder) | {"state": state})


def variables(folder: Path) -> dict[str, str]:
    """Where verl's loggers write. Each start has a file of its own, because verl writes it anew."""
    files = folder / "metrics"
    files.mkdir(parents=True, exist_ok=True)
    place = {"VERL_FILE_LOGGER_PATH": str(_free(files / "start.jsonl")), "TENSORBOARD_DIR": str(folder / "tensorboard")}
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
    accuracy = {}
    for step, data in steps.items():
        if found := [value for name, value in data.items() if name.startswith("val-core/") and "/mean@" in name]:
            accuracy[step] = sum(found) / len(found)
    return Progress(record.get("state", "not started"), max(steps, default=0), accuracy)


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
        return {"state": str(record["state"]), "start": str(record["start"]), "settings": dict(record["settings"])}
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"{file}: not what a run writes ({type(error).__name__}); move it away") from error


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{RECORD}"
    unfinished.write_text(yaml.safe_dump(dict(record), sort_keys=False), encoding="utf-8")
    os.replace(unfinished, folder / RECORD)


def _begins_again(record: Mapping[str, Any], start: str) -> bool:
    """Whether this start is the first one of a `fresh`."""
    return start.startswith("fresh") and (start == "fresh" or record.get("start") != start)


def _has_finished(record: Mapping[str, Any], settings: Mapping[str, Any], config: DictConfig) -> bool:
    resumes = config.trainer.resume_mode == "auto"
    return resumes and record.get("state") == "finished" and record["settings"] == settings


def _free(path: Path) -> Path:
    """`path`, or with the first number that makes it one that is not there: `folder.1`, `file.1.suffix`."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.with_name(f"{stem}.{number}{suffix}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())
