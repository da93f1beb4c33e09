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
from oar_plugin.runs.launch.finding import cause


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
            tell(name, cause(error))


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
            tell("why not", cause(error))


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
        tell("rollout", cause(error))
    tell("doing", "asking verl for the estimator")
    from verl.trainer.ppo import core_algos

    try:
        core_algos.get_adv_estimator_fn("oar")
        tell("loaded", True)
    except ValueError:
        tell("loaded", False)


def recipe(name: str, memory_gib: str, *overrides: str) -> None:
    """What a recipe asks for, and what is wrong with it. `memory_gib` of one GPU; empty where none is visible."""
    from oar_plugin.runs.launch import job, preflight
    from oar_plugin.runs.plan.hardware import choose_gpu
    from oar_plugin.runs.recipe import check_config, compose_recipe, find_recipe, gpus_needed

    folder = find_recipe(name)
    tell("doing", "composing the recipe")
    try:
        config = compose_recipe(folder, "oar", overrides)
        _tell_needs(config)
        check_config(config)
        tell("cluster", dict(zip(("nodes", "gpus_per_node"), gpus_needed(config), strict=False)))
        findings: list[preflight.Finding] = []
        gpu = choose_gpu(memory_gib=float(memory_gib) if memory_gib else None)
        for doing, check in {
            "planning": lambda: preflight.examine_plan(config, gpu, seen=bool(memory_gib))[1],
            "reading the data": lambda: preflight.examine_data(config),
            "looking for the model": lambda: preflight.examine_model(config),
            "import of the reward": lambda: preflight.examine_reward(config),
        }.items():
            tell("doing", doing)
            findings.append(check())
            tell("findings", findings)
        job.facts(config, folder, "oar", overrides)  # what `oar launch` would refuse
    except ValueError as error:
        tell("refused", str(error))


def _tell_needs(config: Any) -> None:
    """Which packages and features the configuration takes."""
    from omegaconf import OmegaConf

    from oar_plugin.hosts.verl.settings import resolve, switched_on
    from oar_plugin.runs.launch.preflight import strings

    def value(key: str, default: Any = None) -> Any:
        found = OmegaConf.select(config, key)
        return default if found is None else found

    tell("device", value("trainer.device", "cuda"))
    tell("mode", value("trainer.v1.trainer_mode"))
    tell("strategy", value("actor_rollout_ref.actor.strategy"))
    tell("vanilla_mbridge", value("actor_rollout_ref.actor.megatron.vanilla_mbridge", False))
    tell("attention", value("actor_rollout_ref.model.override_config.attn_implementation", "flash_attention_2"))
    tell("share", value("actor_rollout_ref.rollout.gpu_memory_utilization"))
    tell("engine", value("actor_rollout_ref.rollout.name"))
    tell("loggers", strings(config, "trainer.logger"))
    tell("offloads", switched_on(config) and resolve(config).offloads)


QUESTIONS: dict[str, Callable[..., None]] = {
    "imports": imports,
    "devices": devices,
    "features": features,
    "recipe": recipe,
}
if __name__ == "__main__":
    QUESTIONS[sys.argv[1]](*sys.argv[2:])
    tell("done", True)
