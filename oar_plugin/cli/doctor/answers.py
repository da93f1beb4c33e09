"""What `ask` asks: each function runs in a process of its own and tells what it finds, key by key.

python -m oar_plugin.cli.doctor.answers QUESTION [ARGUMENT...]
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oar_plugin.cli.doctor.packages import PACKAGES
from oar_plugin.cli.doctor.questions import MARK


def tell(key: str, value: Any) -> None:
    """One answer; `doing` is what is said of a process that ends too early."""
    print(f"\n{MARK}{json.dumps([key, value])}", flush=True)


def imports(*names: str) -> None:
    """What is wrong with the import of each of these packages of the table; null where nothing is."""
    for name in names:
        module = PACKAGES[name].module
        tell("doing", f"import {module}")
        try:
            importlib.import_module(module)
            tell(name, None)
        except (Exception, SystemExit) as error:
            tell(name, _in_words(error))


def devices() -> None:
    """What torch is built for, and the GPUs that it sees: name, and bytes in all and free."""
    import torch

    tell("torch", torch.__version__)
    tell("built for", torch.version.cuda or torch.version.hip)
    tell("doing", "looking for GPUs")
    if torch.cuda.is_available():
        gpus = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            gpus.append({"name": torch.cuda.get_device_name(index), "total": total, "free": free})
        tell("gpus", gpus)
    elif torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except Exception as error:
            tell("why not", _in_words(error))


def features() -> None:
    """What verl does with the plugin, and what of each feature does not fit."""
    from oar_plugin.hosts.verl import capabilities

    tell("verl", capabilities.host_version())
    tell("doing", "import verl")
    import verl

    tell("folder", str(Path(verl.__file__ or "").parent))
    tell("note", capabilities.version_note())
    for feature in capabilities.FEATURES:
        tell("doing", f"looking at {feature}")
        faults = capabilities.missing(feature)
        if feature == "offload":
            from oar_plugin.hosts.vllm import versions

            faults += [reason] if (reason := versions.unsupported(versions.installed())) else []
        tell(f"feature {feature}", [faults, capabilities.unchecked(feature)])
    tell("doing", "import of verl's server for vLLM")
    try:
        importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
        tell("rollout", "")
    except (Exception, SystemExit) as error:
        tell("rollout", _in_words(error))
    tell("doing", "asking verl for the estimator")
    from verl.trainer.ppo import core_algos

    try:
        core_algos.get_adv_estimator_fn("oar")
        tell("loaded", True)
    except ValueError:
        tell("loaded", False)


def recipe(name: str, memory_gib: str, *overrides: str) -> None:
    """What a recipe asks for, and what is wrong with it. `memory_gib` of one GPU; empty where none is visible."""
    from oar_plugin.hosts.verl.recipe import check_config, compose_recipe, find_recipe, gpus_needed
    from oar_plugin.launch import job

    folder = find_recipe(name)
    tell("doing", "composing the recipe")
    try:
        config = compose_recipe(folder, "oar", overrides)
        _tell_needs(config)
        check_config(config)
        tell("cluster", dict(zip(("nodes", "gpus_per_node"), gpus_needed(config), strict=False)))
        _tell_plan(config, memory_gib)
        job.facts(config, folder, "oar", overrides, None)  # what `oar launch` would refuse
    except ValueError as error:
        tell("refused", str(error))


def _tell_needs(config: Any) -> None:
    """What can be read off the configuration: which packages and features, files, reward, model."""
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.settings import resolve, switched_on
    from oar_plugin.math.sources import SOURCES

    def value(key: str, default: Any = None) -> Any:
        found = OmegaConf.select(config, key)
        found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        return default if found is None else found

    def several(key: str) -> list[str]:
        found = value(key, [])
        return [found] if isinstance(found, str) else list(found)

    tell("device", value("trainer.device", "cuda"))
    tell("mode", value("trainer.v1.trainer_mode"))
    tell("strategy", value("actor_rollout_ref.actor.strategy"))
    tell("vanilla_mbridge", value("actor_rollout_ref.actor.megatron.vanilla_mbridge", False))
    tell("attention", value("actor_rollout_ref.model.override_config.attn_implementation", "flash_attention_2"))
    tell("share", value("actor_rollout_ref.rollout.gpu_memory_utilization"))
    tell("engine", value("actor_rollout_ref.rollout.name"))
    tell("loggers", several("trainer.logger"))
    tell("data sets", list(SOURCES))
    tell("files", {file: _data(file, value("data.prompt_key")) for key in _DATA for file in several(key)})
    tell("model", _model(str(value("actor_rollout_ref.model.path"))))
    tell("reward", _reward(value("reward.custom_reward_function.path"), value("reward.custom_reward_function.name")))
    tell("offloads", switched_on(config) and resolve(config).offloads)


_DATA = ("data.train_files", "data.val_files")


def _data(file: str, column: str) -> str | None:
    """What is wrong with a file of prompts; None where nothing is."""
    if "://" in file:
        return None  # verl fetches it
    if not Path(file).is_file():
        return "is not there"
    if Path(file).suffix == ".parquet":
        from pyarrow import parquet

        try:
            columns = parquet.read_schema(file).names
        except (OSError, ValueError) as error:
            return f"cannot be read ({_in_words(error)})"
        if column not in columns:
            return f"has no column {column}, which data.prompt_key names"
    return None


def _model(path: str) -> list[str]:
    """Level and text: a folder, in the cache of the hub, or to be downloaded."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(path).is_dir() or "://" in path:
        return ["ok" if "://" in path or (Path(path) / "config.json").is_file() else "missing", path]
    if Path(path).is_absolute():
        return ["missing", f"{path} is not there"]
    config = try_to_load_from_cache(path, "config.json")
    if isinstance(config, str) and any(Path(config).parent.glob("*.safetensors")):
        return ["ok", f"{path}, in {constants.HF_HUB_CACHE}"]
    if constants.HF_HUB_OFFLINE:
        return ["missing", f"{path} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"]
    return ["note", f"{path} is not in {constants.HF_HUB_CACHE}: the run downloads it"]


def _reward(path: str | None, name: str | None) -> str | None:
    """What is wrong with the reward function of the configuration; None where nothing is, or verl's own is used."""
    from verl.utils.import_utils import load_extern_object

    if not path:
        return None
    tell("doing", f"import of the reward {path}")
    try:
        load_extern_object(path, name)
    except (Exception, SystemExit) as error:
        return _in_words(error)
    return None


def _tell_plan(config: Any, memory_gib: str) -> None:
    """What the planner says of the memory. PlanError: the layout cannot run."""
    from oar_plugin.plan import Plan, PlanError, choose_gpu, suggest
    from oar_plugin.plan.models import load_model

    try:
        load_model(str(config.actor_rollout_ref.model.path))
    except PlanError as error:
        tell("not planned", str(error))
        return
    tell("doing", "planning")
    gpu = choose_gpu(memory_gib=float(memory_gib) if memory_gib else None)
    made = Plan(config, gpu)
    changes = [] if made.fits else suggest(made, lambda changed: Plan(changed, gpu))
    first = " ".join(f"{key}={value}" for key, value in changes[0].overrides.items()) if changes else ""
    tell("plan", {"verdict": made.verdict, "peak": made.peak, "headroom": made.headroom, "change": first})


def _in_words(error: BaseException) -> str:
    """The first line of what an error was raised from in the end: verl wraps those of a reward, say."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


QUESTIONS: dict[str, Callable[..., None]] = {
    "imports": imports,
    "devices": devices,
    "features": features,
    "recipe": recipe,
}
if __name__ == "__main__":
    QUESTIONS[sys.argv[1]](*sys.argv[2:])
    tell("done", True)
