"""Checks before a run waits in a queue. They find faults that would end the run at its start.

`oar launch` and `oar doctor --recipe` share them. A check reports a fault as a `Finding` and does not raise. verl must be
installed, and verl and OAR must accept the configuration. `oar doctor` imports this module on machines that lack many packages:
at the top it imports nothing that needs another package.
"""

from __future__ import annotations

import importlib
import netrc
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from oar_plugin.output import cause
from oar_plugin.runs.hub import HubUnreachable, NotOnHub, cached
from oar_plugin.runs.plan.hardware import GIB, GPUS, Gpu, choose_gpu
from oar_plugin.runs.recipe import gpus_needed

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from oar_plugin.runs.plan.planning import Plan

Level = Literal["ok", "note", "not checked", "missing"]
"""`ok`; `note`: worth knowing; `not checked`: cannot be checked on this machine; `missing`: a run would not start."""

LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "tracking": "wandb"}
"""verl's logger -> the package that it needs. `oar doctor` lists these packages."""
_BUILT_IN = ("console", "file", "rl_insight")  # loggers that need no package


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
    config: DictConfig, gpu: Gpu, *, gpu_seen: bool = True, files_seen: bool = True, local: bool = False
) -> tuple[Plan | None, list[Finding]]:
    """Return the plan of a run, or None if there is none, and the findings. The first is about memory or layout.

    `gpu_seen` is whether the run's GPUs are known to be like `gpu`, `files_seen` whether the run sees the files of this
    machine, `local` whether it runs on this machine.
    """
    made, memory = _examine_plan(config, gpu, gpu_seen)
    if memory.level == "missing" and memory.advice and not local:
        memory = memory._replace(advice=f"{memory.advice}, or --gpu NAME if the nodes have other GPUs")
    findings = [memory]
    needed, here = gpus_needed(config)[2], len(gpus_here())
    if local and config.trainer.device != "cpu" and here < needed:
        advice = "use --on ray, slurm or kubernetes, or fewer GPUs with trainer.n_gpus_per_node=N"
        text = f"the recipe needs {needed} GPUs, this machine has {here}"
        findings.append(Finding("GPUs", "missing", text, advice))
    if not files_seen:
        unseen = "on the nodes, cannot be checked from here"
        return made, findings + [Finding(subject, "not checked", unseen) for subject in ("data", "model", "reward")]
    findings += [_examine_data(config), _examine_model(config, local), _examine_reward(config)]
    return made, findings + list(examine_loggers(strings(config, "trainer.logger")))


def strings(config: DictConfig, key: str) -> list[str]:
    """Return the values of a key as a list; verl accepts one string or a list of strings."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(config, key)
    return [value] if isinstance(value, str) else [str(each) for each in value or ()]


def _examine_plan(config: DictConfig, gpu: Gpu, seen: bool) -> tuple[Plan | None, Finding]:
    """Return the plan, or None if there is none, and the finding about layout and memory.

    If the run's GPUs are unknown (not `seen`), the finding is "not checked".
    """
    from oar_plugin.runs.plan.known import NotPlannedError, PlanError
    from oar_plugin.runs.plan.planning import Plan

    if config.trainer.device == "cpu":
        return None, Finding("memory", "not checked", "the planner supports only GPUs, not trainer.device=cpu")
    try:
        made = Plan(config, gpu)
    except NotPlannedError as error:
        return None, Finding("memory", "not checked", f"not planned: {error}")
    except PlanError as error:
        faults = "; ".join(str(error).splitlines())
        return None, Finding("layout", "missing", faults)
    text = f"projected for GPUs of {gpu.memory_gib:.0f} GiB: {made.verdict}, {made.margin}"
    if not seen:
        return made, Finding("memory", "not checked", text, "oar plan RECIPE --gpu NAME plans for other GPUs")
    if made.fits:
        return made, Finding("memory", "ok" if made.verdict == "fits" else "note", text)
    return made, Finding("memory", "missing", text, made.advice)


@cache
def gpus_here() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees, with their real memory and the speed of the most similar GPU in the planner's table."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        memory = seen.total_memory / GIB
        named = [key for key in GPUS if key.split("-")[0] in seen.name.replace("-", " ").split()] or list(GPUS)
        gpus.append(choose_gpu(min(named, key=lambda key: abs(GPUS[key].memory_gib - memory)), memory))
    return tuple(gpus)


def gpu_of_run(name: str | None, memory_gib: float | None, local: bool) -> Gpu:
    """Return the GPU to plan for: the named one, else for a local run the smallest one of this machine, else H100-80.

    Raise ValueError if no GPU has this name.
    """
    if local and name is None and memory_gib is None and gpus_here():
        return min(gpus_here(), key=lambda gpu: gpu.memory_gib)
    return choose_gpu(name or "H100-80", memory_gib)


def _examine_data(config: DictConfig) -> Finding:
    """Check that the data files exist and have the columns that verl and the reward read."""
    from oar_plugin.runs.math.sources import SOURCES

    columns = (str(config.data.prompt_key), "data_source", "reward_model")
    files = [file for key in ("data.train_files", "data.val_files") for file in strings(config, key)]
    wrong = {file: fault for file in files if (fault := _fault_of(file, columns))}
    if not wrong:
        folders = ", ".join(sorted({str(Path(file).parent.parent) for file in files}))
        return Finding("data", "ok", f"{len(files)} files, in {folders}")
    made = " ".join(dict.fromkeys(name for name in SOURCES for file in wrong if Path(file).parent.name == name))
    advice = [f"oar data {made}"] if made else []
    advice += [] if "OAR_DATA" in os.environ else ["set OAR_DATA to the folder that holds them (default: ~/data/oar)"]
    faults = "; ".join(f"{file} {fault}" for file, fault in wrong.items())
    return Finding("data", "missing", faults, ", or ".join(advice))


def _fault_of(file: str, columns: tuple[str, ...]) -> str | None:
    if "://" in file:
        return None  # verl downloads it
    if not Path(file).is_file():
        return "is not there"
    if Path(file).suffix == ".parquet":
        from pyarrow import parquet

        try:
            there = parquet.read_schema(file).names
        except (OSError, ValueError) as error:
            return f"cannot be read ({cause(error)})"
        if lacking := [column for column in columns if column not in there]:
            named = " (named by data.prompt_key)" if columns[0] in lacking else ""
            return f"has no column {', '.join(lacking)}{named}"
    return None


def _examine_model(config: DictConfig, local: bool) -> Finding:
    """Check that the model is a folder, is in the hub's local cache, or can be downloaded."""
    path = str(config.actor_rollout_ref.model.path)
    key = f"actor_rollout_ref.model.path={path}"
    if "://" in path or (Path(path) / "config.json").is_file():
        return Finding("model", "ok", path)
    if Path(path).is_dir():
        return Finding("model", "missing", f"{path} has no config.json")
    if Path(path).is_absolute():
        return Finding("model", "missing", f"{key}: is not there")
    try:
        found = cached(path)
    except NotOnHub as error:  # other machines may reach the hub
        level: Level = "not checked" if isinstance(error, HubUnreachable) and not local else "missing"
        return Finding("model", level, f"{key}: {error}", "name a folder, or download the model first")
    if found:
        return Finding("model", "ok", f"{path}, in {found}")
    return Finding("model", "note", f"{path} is not in the hub's cache: the run downloads it")


def _examine_reward(config: DictConfig) -> Finding:
    """Check that the reward function can be imported, by importing it as verl does."""
    from omegaconf import OmegaConf

    path, name = (OmegaConf.select(config, f"reward.custom_reward_function.{key}") for key in ("path", "name"))
    if not path:
        return Finding("reward", "ok", "verl's own")
    try:
        if path.startswith("pkg://"):
            module = importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
        else:
            loader = SourceFileLoader("reward_function", path.removeprefix("file://"))
            loader.exec_module(module := module_from_spec(ModuleSpec("reward_function", loader)))
        getattr(module, name)
    except (Exception, SystemExit) as error:
        text = f"reward.custom_reward_function.path={path}: cannot be imported: {cause(error)}"
        return Finding("reward", "missing", text)
    return Finding("reward", "ok", f"{path}: {name}")


def examine_loggers(names: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each logger in `trainer.logger` that would end the run when it logs its first metric."""
    for name in names:
        package = LOGGERS.get(name, name)
        if name not in _BUILT_IN and not importable(package):
            yield Finding("trainer.logger", "missing", f"{name} is not installed", f"pip install {package}")
        elif package == "wandb" and not _wandb_would_start():
            advice = "export WANDB_API_KEY, or `wandb login`, or WANDB_MODE=offline"
            yield Finding("trainer.logger", "missing", "wandb has no API key and would end the run", advice)


def _wandb_would_start() -> bool:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled") or "WANDB_API_KEY" in os.environ:
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
