"""The GPUs and packages of this machine, and what a check lacks on it."""

import importlib.metadata
import os
from functools import cache
from typing import Any

import torch
from torch.utils import collect_env

from benchmarks.machine import describe_machine
from oar_plugin.runs.launch.preflight import importable

REHEARSAL = os.environ.get("VERL_PLATFORM") == "cpu"
"""On a CPU, with dense attention and gloo: a rehearsal shows that the checks themselves work."""
REHEARSED_GPUS = 2
STAND_INS = {"flash_attn", "transformer_engine", "megatron.bridge"}
"""Packages that `verl_cpu` replaces in a rehearsal."""


@cache
def cards() -> list[dict[str, Any]]:
    """Name, capability and GB of each GPU that PyTorch sees."""
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "capability": f"{p.major}.{p.minor}", "gb": round(p.total_memory / 1e9)} for p in every]


def missing(gpus: int = 1, packages: tuple[str, ...] = (), memory_gb: float = 0) -> str | None:
    """The reason why a check with these needs (GPUs, modules, GB on each GPU) cannot run here; None where it can."""
    there = REHEARSED_GPUS if REHEARSAL else len(cards())
    if there < gpus:
        return f"needs {gpus} GPUs, {'a rehearsal pretends' if REHEARSAL else 'there are'} {there}"
    absent = [name for name in packages if not (importable(name) or (REHEARSAL and name in STAND_INS))]
    if absent:
        return f"needs {', '.join(absent)}, not installed"
    smallest = min((card["gb"] for card in cards()), default=0)
    if not REHEARSAL and smallest < memory_gb:
        return f"needs GPUs of {memory_gb:g} GB, the smallest has {smallest}"
    return None


@cache
def describe() -> dict[str, Any]:
    installed = ((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
    # Of a name that is there twice, the first on the path is imported.
    versions = {name.lower().replace("_", "-"): version for name, version in reversed([*installed]) if name}
    return {
        **describe_machine(torch.device("cpu" if REHEARSAL else "cuda")),
        "rehearsal": REHEARSAL,
        "gpus": cards(),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cards() else None,
        "versions": dict(sorted(versions.items())),
    }
