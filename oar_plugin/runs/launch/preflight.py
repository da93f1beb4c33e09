"""What a run would end at before or during its first step, looked at before anything waits in a queue.

`oar launch` and `oar doctor --recipe` share these checks. Each gives findings and raises nothing for what it finds; verl must
be installed, and the configuration one that verl and OAR accept.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from oar_plugin.runs.launch.finding import Finding, cause, importable
from oar_plugin.runs.launch.loggers import examine_loggers
from oar_plugin.runs.launch.schedule import CALLBACK, Schedule, added_overrides, disk_bytes, in_words, schedule
from oar_plugin.runs.math.sources import SOURCES
from oar_plugin.runs.plan.hardware import GIB, GPUS, Gpu, choose_gpu
from oar_plugin.runs.plan.models import PlanError, load_model
from oar_plugin.runs.plan.planning import Plan, suggest
from oar_plugin.runs.recipe import gpus_needed

UNSEEN = "on the nodes, and not looked at from here"


class Forecast(NamedTuple):
    """What the planner says of a run; `made` is None where it does not know the model, or the layout cannot run."""

    config: DictConfig
    made: Plan | None
    memory: Finding
    schedule: Schedule
    added: list[str]  # overrides that follow from it

    def in_words(self) -> str:
        if self.made is None:
            return f"Hours are not known: {self.memory.text}."
        chosen = any(word.startswith("trainer.save_freq=") for word in self.added)
        every = self.schedule.save_freq if chosen else self.config.trainer.save_freq
        if every is None or every <= 0:
            return f"{in_words(self.made)} No checkpoints."
        return (
            f"{in_words(self.made)} A checkpoint every {every} steps, about {every * self.made.step / 60:.0f} minutes."
        )


def forecast(config: DictConfig, given: Sequence[str], gpu: Gpu, limit_h: int) -> Forecast:
    """`given`: the overrides of the command line; `limit_h`: the longest job, in hours."""
    made, memory = examine_plan(config, gpu)
    planned = schedule(made, limit_h)
    return Forecast(config, made, memory, planned, added_overrides(config, given, planned.save_freq))


def examine(forecasts: Sequence[Forecast], files_seen: bool, local: bool) -> list[Finding]:
    """The findings of `oar launch` for several runs, each once.

    Args:
        forecasts: of the runs.
        files_seen: whether they see the files that this machine sees.
        local: whether they run on this machine.
    """
    each = (finding for of_run in forecasts for finding in _examine(of_run, files_seen, local))
    disk = _examine_disk(forecasts) if files_seen else Finding("disk", "not checked", UNSEEN)
    return [*dict.fromkeys(each), disk]


def _examine(of_run: Forecast, files_seen: bool, local: bool) -> Iterator[Finding]:
    config, memory = of_run.config, of_run.memory
    if local:
        yield memory
        yield from _examine_machine(config)
    else:
        other = "--gpu NAME if the nodes have others"
        yield memory._replace(advice=f"{memory.advice}, or {other}") if memory.level == "missing" else memory
    if not files_seen:
        yield from (Finding(subject, "not checked", UNSEEN) for subject in ("data", "model", "reward"))
        return
    yield examine_data(config)
    yield examine_model(config)
    yield examine_reward(config)
    yield from examine_loggers(strings(config, "trainer.logger"))
    if config.trainer.save_freq > 0 and not importable(CALLBACK):
        text = "the best checkpoint is not kept apart: this verl has no trainer.checkpoint_callback_class"
        yield Finding("checkpoints", "note", text, "verl 0.9.1 has")


def strings(config: DictConfig, key: str) -> list[str]:
    """A key that verl takes as one string or as several."""
    found = OmegaConf.select(config, key)
    return [found] if isinstance(found, str) else [str(each) for each in found or ()]


# ---- memory and layout


def examine_plan(config: DictConfig, gpu: Gpu, seen: bool = True) -> tuple[Plan | None, Finding]:
    """The plan, None where there is none, and what it says of layout and memory; `seen`: such GPUs are there."""
    if config.trainer.device == "cpu":
        return None, Finding("memory", "not checked", "the planner knows GPUs only, and this is trainer.device=cpu")
    try:
        load_model(str(config.actor_rollout_ref.model.path))
    except PlanError as error:
        return None, Finding("memory", "not checked", f"not planned: {error}", "oar plan RECIPE --model DIR")
    try:
        made = Plan(config, gpu)
    except PlanError as error:
        return None, Finding("layout", "missing", "; ".join(str(error).splitlines()), "oar plan RECIPE says what fits")
    left = f"{abs(made.headroom) / GIB:.1f} GiB {'left' if made.headroom >= 0 else 'missing'} in {made.peak}"
    left += "" if made.cached >= 1 else "; vLLM's cache holds less than one sequence"
    text = f"projected for GPUs of {gpu.memory_gib:.0f} GiB: {made.verdict}, {left}"
    if not seen:
        return made, Finding("memory", "not checked", text, "oar plan RECIPE --gpu NAME for others")
    if made.fits:
        return made, Finding("memory", "ok" if made.verdict == "fits" else "note", text)
    changes = suggest(made, lambda changed: Plan(changed, gpu))
    first = " ".join(f"{key}={value}" for key, value in changes[0].overrides.items()) if changes else ""
    return made, Finding("memory", "missing", text, first or "no known change helps; oar plan RECIPE says more")


@cache
def gpus_here() -> tuple[Gpu, ...]:
    """Those that torch sees, each as the planner knows it: its own memory, and the speed of the nearest of its table."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        seen = torch.cuda.get_device_properties(index)
        memory = seen.total_memory / GIB
        named = [key for key in GPUS if key.split("-")[0] in seen.name] or list(GPUS)
        found.append(choose_gpu(min(named, key=lambda key: abs(GPUS[key].memory_gib - memory)), memory))
    return tuple(found)


def gpu_of_run(name: str | None, memory_gib: float | None, local: bool) -> Gpu:
    """The one that is named, else of a local run the smallest here, else the planner's usual one.

    ValueError: there is no such GPU.
    """
    if local and name is None and memory_gib is None and gpus_here():
        return min(gpus_here(), key=lambda gpu: gpu.memory)
    return choose_gpu(name or "H100-80", memory_gib)


def _examine_machine(config: DictConfig) -> Iterator[Finding]:
    needed, here = gpus_needed(config)[2], len(gpus_here())
    if config.trainer.device != "cpu" and here < needed:
        advice = "--on ray, slurm or kubernetes, or fewer with trainer.n_gpus_per_node=N"
        yield Finding("GPUs", "missing", f"the recipe needs {needed} GPUs, here are {here}", advice)
    # verl's own Ray takes ports that are free; but `ray.init` prefers one that is there.
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108  Ray's own
    address = os.environ.get("RAY_ADDRESS") or (
        current.read_text(encoding="utf-8").strip() if current.is_file() else ""
    )
    if address not in ("", "local"):
        advice = "RAY_ADDRESS=local starts one of its own; `ray stop` ends one that nobody needs"
        yield Finding("Ray", "note", f"training joins the Ray cluster at {address}", advice)


# ---- files


def examine_data(config: DictConfig) -> Finding:
    """Whether the files are there and hold what verl and the reward read."""
    columns = (str(config.data.prompt_key), "data_source", "reward_model")
    files = [file for key in ("data.train_files", "data.val_files") for file in strings(config, key)]
    wrong = {file: fault for file in files if (fault := _fault_of(file, columns))}
    if not wrong:
        folders = ", ".join(sorted({str(Path(file).parent.parent) for file in files}))
        return Finding("data", "ok", f"{len(files)} files, in {folders}")
    made = " ".join(dict.fromkeys(name for name in SOURCES for file in wrong if Path(file).parent.name == name))
    advice = [f"oar data {made}"] if made else []
    advice += [] if "OAR_DATA" in os.environ else ["OAR_DATA=the folder that has them (not set: ~/data/oar)"]
    return Finding(
        "data", "missing", "; ".join(f"{file} {fault}" for file, fault in wrong.items()), ", or ".join(advice)
    )


def _fault_of(file: str, columns: tuple[str, ...]) -> str | None:
    if "://" in file:
        return None  # verl fetches it
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
    """A folder, in the cache of the hub, or to be downloaded."""
    from huggingface_hub import constants, try_to_load_from_cache

    path = str(config.actor_rollout_ref.model.path)
    if Path(path).is_dir() or "://" in path:
        whole = "://" in path or (Path(path) / "config.json").is_file()
        return Finding("model", "ok", path) if whole else Finding("model", "missing", f"{path} has no config.json")
    key = f"actor_rollout_ref.model.path={path}"
    if Path(path).is_absolute():
        return Finding("model", "missing", f"{key}: is not there")
    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str) and any(Path(cached).parent.glob("*.safetensors")):
        return Finding("model", "ok", f"{path}, in {constants.HF_HUB_CACHE}")
    if constants.HF_HUB_OFFLINE:
        return Finding("model", "missing", f"{key}: not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set")
    return Finding("model", "note", f"{path} is not in {constants.HF_HUB_CACHE}: the run downloads it")


def examine_reward(config: DictConfig) -> Finding:
    """Import the reward function in this process: what it raises is a finding."""
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


def _examine_disk(forecasts: Sequence[Forecast]) -> Finding:
    """Room for the checkpoints of all runs that are not written yet. A quota is not seen."""
    needed, there, folder = 0.0, 0, Path(forecasts[0].config.trainer.default_local_dir)
    for config, made, *_ in forecasts:
        if config.trainer.save_freq <= 0:
            continue
        if made is None:
            return Finding("disk", "not checked", "how large a checkpoint is, the planner does not know")
        needed += disk_bytes(made.setup, config)
        files = Path(config.trainer.default_local_dir).glob("global_step_*/**/*")
        there += sum(file.stat().st_size for file in files if file.is_file())
    parent = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if parent == Path(parent.anchor):
        return Finding("disk", "not checked", f"{folder}: not on this machine")
    free = shutil.disk_usage(parent).free
    text = f"{free / 1e9:,.0f} GB free in {parent}; the checkpoints take {needed / 1e9:,.0f} GB"
    if needed - there <= free:
        return Finding("disk", "ok", text)
    advice = "OAR_CHECKPOINTS=another folder, or fewer with trainer.max_actor_ckpt_to_keep"
    return Finding("disk", "missing", text, advice)
