"""Checks that find, before a run waits in a queue, faults that would end it at its start.

`oar launch` and `oar doctor --recipe` share them. A check reports a fault as a `Finding` and does not raise. verl must be
installed, and verl and OAR must accept the configuration.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from oar_plugin.runs.launch.finding import Finding, cause, examine_loggers
from oar_plugin.runs.math.sources import SOURCES
from oar_plugin.runs.plan.hardware import GIB, GPUS, Gpu, choose_gpu
from oar_plugin.runs.plan.models import PlanError, load_model
from oar_plugin.runs.plan.planning import Plan, suggest
from oar_plugin.runs.recipe import gpus_needed


def summary(made: Plan) -> str:
    """Return a sentence with the steps, hours and GPU-hours of a run."""
    s, gpus = made.setup, made.setup.gpus + (made.setup.rollout_gpus if made.setup.dedicated else 0)
    if made.hours is None:
        return "Hours are unknown (the number of rows in data.train_files is, too): set trainer.total_training_steps=N."
    validation = "with validation"
    if s.validated is None:
        validation = "without validation (the number of rows in data.val_files is unknown)"
    hours, least, most = made.hours
    return (
        f"The run: {s.steps} steps, {hours:.0f} hours ({least:.0f} to {most:.0f}), {hours * gpus:,.0f} GPU-hours on "
        f"{gpus} GPUs ({least * gpus:,.0f} to {most * gpus:,.0f}), {validation}, without rewards and checkpoints."
    )


def examine(config: DictConfig, memory: Finding, files_seen: bool, local: bool) -> Iterator[Finding]:
    """Yield the findings about a run.

    Args:
        config: The run's configuration.
        memory: The finding of `examine_plan`.
        files_seen: Whether the run sees the files of this machine.
        local: Whether it runs on this machine.
    """
    if memory.level == "missing" and not local:
        memory = memory._replace(advice=f"{memory.advice}, or --gpu NAME if the nodes have other GPUs")
    yield memory
    needed, here = gpus_needed(config)[2], len(gpus_here())
    if local and config.trainer.device != "cpu" and here < needed:
        advice = "use --on ray, slurm or kubernetes, or fewer GPUs with trainer.n_gpus_per_node=N"
        yield Finding("GPUs", "missing", f"the recipe needs {needed} GPUs, this machine has {here}", advice)
    if files_seen:
        yield examine_data(config)
        yield examine_model(config)
        yield examine_reward(config)
        yield from examine_loggers(strings(config, "trainer.logger"))
    else:
        unseen = "on the nodes, cannot be checked from here"
        yield from (Finding(subject, "not checked", unseen) for subject in ("data", "model", "reward"))


def strings(config: DictConfig, key: str) -> list[str]:
    """Return the values of a key as a list; verl accepts one string or a list of strings."""
    value = OmegaConf.select(config, key)
    return [value] if isinstance(value, str) else [str(each) for each in value or ()]


# ---- memory and layout


def examine_plan(config: DictConfig, gpu: Gpu, seen: bool = True) -> tuple[Plan | None, Finding]:
    """Return the plan, or None if there is none, and the finding about layout and memory.

    Args:
        config: The run's configuration.
        gpu: The GPU to plan for.
        seen: Whether the run's GPUs are known; if not, the finding is "not checked".
    """
    if config.trainer.device == "cpu":
        return None, Finding("memory", "not checked", "the planner supports only GPUs, not trainer.device=cpu")
    try:
        load_model(str(config.actor_rollout_ref.model.path))
    except PlanError as error:
        return None, Finding("memory", "not checked", f"not planned: {error}", "oar plan RECIPE --model DIR")
    try:
        made = Plan(config, gpu)
    except PlanError as error:
        faults = "; ".join(str(error).splitlines())
        return None, Finding("layout", "missing", faults, "oar plan RECIPE suggests settings that fit")
    left = f"{abs(made.headroom) / GIB:.1f} GiB {'left' if made.headroom >= 0 else 'missing'} in {made.peak}"
    left += "" if made.cached >= 1 else "; vLLM's cache holds less than one sequence"
    text = f"projected for GPUs of {gpu.memory_gib:.0f} GiB: {made.verdict}, {left}"
    if not seen:
        return made, Finding("memory", "not checked", text, "oar plan RECIPE --gpu NAME plans for other GPUs")
    if made.fits:
        return made, Finding("memory", "ok" if made.verdict == "fits" else "note", text)
    changes = suggest(made, lambda changed: Plan(changed, gpu))
    first = " ".join(f"{key}={value}" for key, value in changes[0].overrides.items()) if changes else ""
    return made, Finding("memory", "missing", text, first or "oar plan RECIPE suggests settings that fit")


@cache
def gpus_here() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees, with their real memory and the speed of the most similar GPU in the planner's table."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        memory = seen.total_memory / GIB
        named = [key for key in GPUS if key.split("-")[0] in seen.name] or list(GPUS)
        gpus.append(choose_gpu(min(named, key=lambda key: abs(GPUS[key].memory_gib - memory)), memory))
    return tuple(gpus)


def gpu_of_run(name: str | None, memory_gib: float | None, local: bool) -> Gpu:
    """Return the GPU to plan for: the named one, else for a local run the smallest one of this machine, else H100-80.

    Raises:
        ValueError: there is no GPU of this name.
    """
    if local and name is None and memory_gib is None and gpus_here():
        return min(gpus_here(), key=lambda gpu: gpu.memory)
    return choose_gpu(name or "H100-80", memory_gib)


# ---- files


def examine_data(config: DictConfig) -> Finding:
    """Check that the data files exist and have the columns that verl and the reward read."""
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


def examine_model(config: DictConfig) -> Finding:
    """Check that the model is a folder, is in the hub's local cache, or can be downloaded."""
    from huggingface_hub import constants, try_to_load_from_cache

    path = str(config.actor_rollout_ref.model.path)
    key = f"actor_rollout_ref.model.path={path}"
    if "://" in path or (Path(path) / "config.json").is_file():
        return Finding("model", "ok", path)
    if Path(path).is_dir():
        return Finding("model", "missing", f"{path} has no config.json")
    if Path(path).is_absolute():
        return Finding("model", "missing", f"{key}: is not there")
    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str) and any(Path(cached).parent.glob("*.safetensors")):
        return Finding("model", "ok", f"{path}, in {constants.HF_HUB_CACHE}")
    if constants.HF_HUB_OFFLINE:
        return Finding("model", "missing", f"{key}: not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set")
    return Finding("model", "note", f"{path} is not in {constants.HF_HUB_CACHE}: the run downloads it")


def examine_reward(config: DictConfig) -> Finding:
    """Check that the reward function can be imported, by importing it."""
    from verl.utils.import_utils import load_extern_object

    path, name = (OmegaConf.select(config, f"reward.custom_reward_function.{key}") for key in ("path", "name"))
    if not path:
        return Finding("reward", "ok", "verl's own")
    try:
        load_extern_object(path, name)
    except (Exception, SystemExit) as error:
        text = f"reward.custom_reward_function.path={path}: cannot be imported: {cause(error)}"
        return Finding("reward", "missing", text)
    return Finding("reward", "ok", f"{path}: {name}")
