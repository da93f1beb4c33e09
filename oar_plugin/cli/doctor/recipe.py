"""What a recipe needs, and what of it is not there; without one, the data that recipes read."""

import os
from collections.abc import Iterator
from typing import Any

from oar_plugin.cli.doctor.machine import Machine
from oar_plugin.cli.doctor.packages import ALWAYS
from oar_plugin.cli.doctor.questions import Answer
from oar_plugin.runs.launch.finding import LOGGERS, Finding, examine_loggers, importable
from oar_plugin.runs.math import data_folder

# What a run takes where no recipe says otherwise: verl's defaults.
PLAIN: dict[str, Any] = {
    **{"mode": "sync", "strategy": "fsdp", "vanilla_mbridge": True, "attention": "flash_attention_2", "engine": "vllm"},
    **{"loggers": ["console", "wandb"], "offloads": False},
}


def packages_for(told: dict[str, Any], on_cpu: bool) -> set[str]:
    """Names of the table that a run cannot start without."""
    wanted = PLAIN | told
    needed = {*ALWAYS, *(LOGGERS[name] for name in wanted["loggers"] if name in LOGGERS)}
    if wanted["engine"] != "vllm":
        needed.discard("vllm")
    if wanted["strategy"] == "megatron":
        needed |= {"megatron-core", "mbridge" if wanted["vanilla_mbridge"] else "megatron-bridge"}
        needed |= set() if on_cpu else {"transformer-engine"}
    # transformers downloads a kernel in place of the package where `kernels` is installed.
    elif wanted["attention"] == "flash_attention_2" and not on_cpu and not importable("kernels"):
        needed.add("flash-attn")
    return needed


def features_for(told: dict[str, Any]) -> set[str]:
    """Names of `capabilities.FEATURES` that a run cannot start without."""
    wanted = PLAIN | told
    engine = "megatron" if wanted["strategy"] == "megatron" else "fsdp"
    return {str(wanted["mode"]), engine, *(["offload"] if wanted["offloads"] else [])}


def examine_recipe(answer: Answer, machine: Machine) -> Iterator[Finding]:
    """Configuration, GPUs, memory, data, model and reward of a recipe."""
    told, fault = answer
    if refused := told.get("refused"):
        yield Finding("configuration", "missing", refused)
    elif fault:
        yield Finding("configuration", "missing", f"could not be read: {fault}", "see above; then: oar plan RECIPE")
    else:
        yield Finding("configuration", "ok", f"strategy={told['strategy']}, trainer_mode={told['mode']}")
    if "cluster" in told:
        yield from _cluster(told, machine)
    yield from (Finding(*found) for found in told.get("findings", []))
    yield from examine_loggers(told.get("loggers", []))


def _cluster(told: dict[str, Any], machine: Machine) -> Iterator[Finding]:
    nodes, needed, seen = told["cluster"]["nodes"], told["cluster"]["gpus_per_node"], len(machine.gpus)
    text = f"needs {nodes} node{'s' if nodes > 1 else ''} with {needed} GPUs"
    if told["device"] == "cpu":
        yield Finding("cluster", "ok", "needs no GPU")
        return
    if machine.on_cpu:
        platform = os.environ.get("VERL_PLATFORM")
        why = f"VERL_PLATFORM={platform}" if platform else f"torch {machine.torch} is built without CUDA"
        yield Finding("cluster", "missing", f"{text}; {why}", "a torch build for CUDA, and VERL_PLATFORM unset")
    elif machine.gpus and seen < needed:
        advice = f"another machine, or: oar plan RECIPE trainer.n_gpus_per_node={seen}"
        yield Finding("cluster", "missing", f"{text}; here {seen} visible", advice)
    else:
        several = "this machine is one of them: run this on each" if nodes > 1 else ""
        yield Finding("cluster", "ok" if machine.gpus else "not checked", text, several)


def examine_data() -> Finding:
    """Which data sets are in OAR_DATA."""
    given = os.environ.get("OAR_DATA")
    folder = data_folder()
    where = f"OAR_DATA={given}" if given else f"OAR_DATA is not set: recipes read {folder}"
    there = sorted({file.parent.name for file in folder.glob("*/*.parquet")})
    if there:
        return Finding("data", "ok", f"{where}; found: {', '.join(there)}")
    return Finding("data", "note", f"{where}; nothing is there", "oar data makes it; only recipes read it")
