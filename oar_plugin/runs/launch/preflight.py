"""Checks before a run waits in a queue. They find faults that would end the run at its start.

`oar launch` and `oar doctor --recipe` share them. A check reports a fault as a `Finding` and does not raise. `oar doctor`
imports this module on machines that lack many packages: at the top it imports nothing that needs another package.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from oar_plugin.output import cause
from oar_plugin.runs.hub import HubUnreachable, NotOnHub, cached

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from oar_plugin.runs.plan.known import Gpu
    from oar_plugin.runs.plan.planning import Plan

Level = Literal["ok", "note", "not checked", "missing"]
"""`ok`; `note`: worth knowing; `not checked`: cannot be checked on this machine; `missing`: a run would not start."""


class Finding(NamedTuple):
    """The result of one check, which `oar doctor` and `oar launch` print as one line."""

    subject: str
    level: Level
    text: str
    advice: str = ""


def importable(module: str) -> bool:
    """Return whether Python finds a module, without importing it; False if a parent package is missing or broken."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def examine(
    config: DictConfig, gpu: Gpu, words: Sequence[str] = (), *, files_seen: bool = True, local: bool = False
) -> tuple[Plan | None, list[Finding]]:
    """Return the plan of a run, or None if there is none, and the findings. The first is about memory or layout.

    `words` are the run's overrides, `files_seen` is whether it sees the files of this machine, `local` whether it runs here.
    """
    from oar_plugin.hosts.verl.settings import doubts

    made, memory = _examine_plan(config, gpu)
    found = [Finding(subject, "missing" if ends else "note", text) for subject, ends, text in doubts(config, words)]
    if not files_seen:
        unseen = "on the nodes, cannot be checked from here"
        return made, [memory, *found, *(Finding(each, "not checked", unseen) for each in ("data", "model", "reward"))]
    return made, [memory, *found, _examine_data(config), _examine_model(config, local), _examine_reward(config)]


def _examine_plan(config: DictConfig, gpu: Gpu) -> tuple[Plan | None, Finding]:
    """Return the plan and the finding about layout and memory."""
    from oar_plugin.runs.plan.planning import NotPlannedError, Plan, PlanError

    if config.trainer.device == "cpu":
        return None, Finding("memory", "not checked", "the planner supports only GPUs, not trainer.device=cpu")
    try:
        made = Plan(config, gpu)
    except NotPlannedError as error:
        return None, Finding("memory", "not checked", f"not planned: {error}")
    except PlanError as error:
        return None, Finding("layout", "missing", "; ".join(str(error).splitlines()))
    text = f"by formula, for GPUs of {gpu.memory_gib:.0f} GiB: {made.verdict}, {made.margin}"
    if made.fits:
        return made, Finding("memory", "ok" if made.verdict == "fits" else "note", text)
    return made, Finding("memory", "missing", text, f"{made.advice}, or --gpu NAME if the run has other GPUs")


def gpu_of_run(name: str | None, local: bool) -> Gpu:
    """Return the named GPU, else for a local run this machine's, with the speed of the most similar known one, else H100-80."""
    import torch

    from oar_plugin.runs.plan.known import GIB, GPUS, choose_gpu

    if name or not local or not torch.cuda.device_count():
        return choose_gpu(name or "H100-80")
    here = min(torch.cuda.get_device_properties(i).total_memory / GIB for i in range(torch.cuda.device_count()))
    return choose_gpu(min(GPUS, key=lambda key: abs(GPUS[key].memory_gib - here)), here)


def _examine_data(config: DictConfig) -> Finding:
    columns = (str(config.data.prompt_key), "data_source", "reward_model")  # that verl and the reward read
    # Each key has one string or a list of strings.
    given = [config.data.get(key) or () for key in ("train_files", "val_files")]
    files = [str(file) for value in given for file in ([value] if isinstance(value, str) else value)]
    if faults := [f"{file} {fault}" for file in files if (fault := _fault_of(file, columns))]:
        advice = "`oar data` makes the recipes' files; OAR_DATA names the folder that holds them (default: ~/data/oar)"
        return Finding("data", "missing", "; ".join(faults), advice)
    folders = ", ".join(sorted({str(Path(file).parent) for file in files}))
    return Finding("data", "ok", f"{len(files)} files, in {folders}")


def _fault_of(file: str, columns: Sequence[str]) -> str | None:
    if "://" not in file and not Path(file).is_file():
        return "is not there"
    if "://" in file or Path(file).suffix != ".parquet":
        return None  # verl downloads it, or reads its columns
    from pyarrow import parquet

    try:
        lacking = [column for column in columns if column not in parquet.read_schema(file).names]
    except (OSError, ValueError) as error:
        return f"cannot be read ({cause(error)})"
    return f"has no column {', '.join(lacking)}" if lacking else None


def _examine_model(config: DictConfig, local: bool) -> Finding:
    path = str(config.actor_rollout_ref.model.path)
    if "://" in path or (Path(path) / "config.json").is_file():
        return Finding("model", "ok", path)
    if Path(path).is_dir() or Path(path).is_absolute():
        return Finding("model", "missing", f"actor_rollout_ref.model.path={path}: no config.json there")
    try:
        found = cached(path)
    except NotOnHub as error:  # other machines may reach the hub
        level: Level = "not checked" if isinstance(error, HubUnreachable) and not local else "missing"
        text = f"actor_rollout_ref.model.path={path}: {error}"
        return Finding("model", level, text, "name a folder, or download the model first")
    text = f"{path}, in {found}" if found else f"{path} is not in the hub's cache: the run downloads it"
    return Finding("model", "ok" if found else "note", text)


def _examine_reward(config: DictConfig) -> Finding:
    from omegaconf import OmegaConf

    path, name = (OmegaConf.select(config, f"reward.custom_reward_function.{key}") for key in ("path", "name"))
    try:
        if path and path.startswith("pkg://"):
            vars(importlib.import_module(path.removeprefix("pkg://").replace("/", ".")))[name]
        elif path:
            runpy.run_path(path.removeprefix("file://"))[name]
    except (Exception, SystemExit) as error:
        text = f"reward.custom_reward_function.path={path}: cannot be imported: {cause(error)}"
        return Finding("reward", "missing", text)
    return Finding("reward", "ok", f"{path}: {name}" if path else "verl's own")
