"""What a recipe needs, and what of it is not there; without one, the data that recipes read."""

import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oar_plugin.cli.doctor.finding import Finding
from oar_plugin.cli.doctor.machine import GIB, Machine
from oar_plugin.cli.doctor.packages import ALWAYS
from oar_plugin.cli.doctor.questions import Answer
from oar_plugin.importable import importable

LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "tracking": "wandb"}  # to the package of the table
BUILT_IN = ("console", "file", "rl_insight")  # and those that verl's own packages bring
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
    if "plan" in told or "not planned" in told:
        yield _memory(told, machine)
    if "files" in told:
        yield _data(told)
    if "model" in told:
        level, text = told["model"]
        yield Finding("model", level, text)
    if reward := told.get("reward"):
        yield Finding("reward", "missing", f"cannot be imported: {reward}")
    for name in told.get("loggers", []):
        if name not in LOGGERS and name not in BUILT_IN and not importable(name):
            yield Finding("trainer.logger", "missing", f"{name} is not installed", f"pip install {name}")
    if "wandb" in told.get("loggers", []) and not _wandb_would_start():
        advice = "export WANDB_API_KEY, or `wandb login`, or WANDB_MODE=offline"
        yield Finding("trainer.logger", "missing", "wandb has no API key, and would end the run", advice)


def _wandb_would_start() -> bool:
    try:
        hosts = list(netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        hosts = []
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
    return offline or "WANDB_API_KEY" in os.environ or any("wandb" in host for host in hosts)


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


def _memory(told: dict[str, Any], machine: Machine) -> Finding:
    if "not planned" in told:
        return Finding("memory", "not checked", f"not planned: {told['not planned']}", "oar plan RECIPE --model DIR")
    plan = told["plan"]
    left = f"{abs(plan['headroom']) / GIB:.0f} GiB {'left' if plan['headroom'] >= 0 else 'missing'} in {plan['peak']}"
    text = f"projected: {plan['verdict']}, {left}"
    if machine.memory_gib is None:
        return Finding("memory", "not checked", f"on GPUs of 80 GB, {text}", "oar plan RECIPE --gpu NAME for others")
    if plan["verdict"] == "does not fit":
        return Finding("memory", "missing", text, plan["change"] or "no known change helps; oar plan RECIPE says more")
    return Finding("memory", "ok" if plan["verdict"] == "fits" else "note", text)


def _data(told: dict[str, Any]) -> Finding:
    files: dict[str, str | None] = told["files"]
    wrong = {file: fault for file, fault in files.items() if fault}
    if not wrong:
        return Finding("data", "ok", f"{len(files)} files, in {', '.join(sorted({_folder(file) for file in files}))}")
    made = " ".join(name for name in told["data sets"] if any(Path(file).parent.name == name for file in wrong))
    advice = [f"oar data {made}"] if made else []
    advice += [] if "OAR_DATA" in os.environ else ["OAR_DATA=the folder that has them (not set: ~/data/oar)"]
    return Finding(
        "data", "missing", "; ".join(f"{file} {fault}" for file, fault in wrong.items()), ", or ".join(advice)
    )


def _folder(file: str) -> str:
    return str(Path(file).parent.parent)


def examine_data() -> Finding:
    """Which data sets are in OAR_DATA."""
    given = os.environ.get("OAR_DATA")
    folder = Path(given or Path.home() / "data" / "oar")
    where = f"OAR_DATA={given}" if given else f"OAR_DATA is not set: recipes read {folder}"
    there = sorted({file.parent.name for file in folder.glob("*/*.parquet")})
    if there:
        return Finding("data", "ok", f"{where}; found: {', '.join(there)}")
    return Finding("data", "note", f"{where}; nothing is there", "oar data makes it; only recipes read it")
