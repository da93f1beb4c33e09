"""Which packages a run needs, and the versions that were tested: the one table of them."""

import importlib.metadata
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from oar_plugin.cli.doctor.questions import ask
from oar_plugin.hosts.vllm import versions
from oar_plugin.runs.launch.finding import Finding


class Package(NamedTuple):
    """A package that verl or OAR may need."""

    purpose: str
    module: str  # its import shows that it works
    install: str
    tested: tuple[str, str] | None = None  # from and to; None: none was tested, it needs a GPU


_RECIPES = "pip install '.[recipes]' in a checkout, or see recipes/CLUSTERS.md for verl's image"
_WHEELS = "the wheel that goes with your torch and CUDA; verl's image has it"
PACKAGES = {
    "torch": Package("everything", "torch", "pip install torch", ("2.11", "2.13")),
    "ray": Package("the cluster", "ray", 'pip install "ray[default]"', ("2.50", "2.60")),
    "transformers": Package(
        "models", "transformers", 'pip install "transformers>=5.5.3,<5.11,!=5.6.0"', ("5.5.3", "5.10")
    ),
    "TransferQueue": Package(
        "verl's data plane", "transfer_queue", 'pip install "TransferQueue>=0.1.10"', ("0.1.11", "0.1.11")
    ),
    "vllm": Package(
        "rollouts", "vllm._C",
        "pip install vllm, the release that goes with your torch (without a GPU: bash recipes/cpu_demo/run.sh)",
        versions.TRIED,
    ),
    "flash-attn": Package("attention of FSDP and FSDP2", "flash_attn", _WHEELS),
    "transformer-engine": Package("layers of Megatron", "transformer_engine.pytorch", _WHEELS),
    "megatron-core": Package("strategy=megatron", "megatron.core", "see docs/megatron.md", ("0.16.1", "0.18")),
    "mbridge": Package(
        "Megatron's weights, vanilla_mbridge=True", "mbridge", "pip install --no-deps mbridge", ("0.15", "0.15")
    ),
    "megatron-bridge": Package(
        "Megatron's weights, vanilla_mbridge=False", "megatron.bridge", "see docs/megatron.md", ("0.5", "0.5")
    ),
    "tensorboard": Package("trainer.logger", "torch.utils.tensorboard", "pip install tensorboard", ("2.20", "2.21")),
    "wandb": Package("trainer.logger", "wandb", "pip install wandb", ("0.27", "0.31")),
    "math-verify": Package("the recipes' reward", "math_verify", _RECIPES, ("0.9", "0.9")),
    "pebble": Package("the recipes' reward", "pebble", _RECIPES, ("5.1", "5.2")),
    "datasets": Package("data", "datasets", _RECIPES, ("4", "5")),
}  # fmt: skip
ALWAYS = ("torch", "ray", "transformers", "TransferQueue", "vllm", "datasets")
NEED_A_DRIVER = ("vllm", "flash-attn", "transformer-engine", "megatron-core", "megatron-bridge", "mbridge")


def examine_packages(needed: Collection[str], without_gpus: bool) -> Iterator[Finding]:
    """Each package of the table: is it there, does it import, was its version tested.

    Args:
        needed: what a run cannot start without.
        without_gpus: whether this machine lacks the GPUs of the run: packages that were compiled for GPUs may not import.
    """
    faults = imports(list(PACKAGES))
    for name, package in PACKAGES.items():
        version, fault = version_of(name), faults[name]
        if fault is not None and version is None and _is_absent(package.module, fault):
            yield Finding(
                name, "missing" if name in needed else "note", f"not installed ({package.purpose})", package.install
            )
        elif fault is not None:
            yield _broken(name, version, fault, name in needed, without_gpus)
        else:
            yield _working(name, version or "of unknown version")


def version_of(name: str) -> str | None:
    """Of a package of the table; None where it is not installed, or lies on the search path as a checkout. Imports nothing."""
    if name == "vllm":
        return versions.installed()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def imports(names: list[str]) -> dict[str, str | None]:
    """What is wrong with the import of each.

    One that takes its process down or hangs is said to be broken, and the others are asked again.
    """
    faults: dict[str, str | None] = {}
    while names:
        answer = ask("imports", *names)
        faults.update((name, answer.told[name]) for name in names if name in answer.told)
        names = [name for name in names if name not in faults]
        if names:  # in this order they are imported
            faults[names.pop(0)] = answer.fault or "its import ended the process"
    return faults


def _is_absent(module: str, fault: str) -> bool:
    """Whether what was not found is the module itself, or a package that holds it."""
    found = re.fullmatch(r"ModuleNotFoundError: No module named '([\w.]+)'", fault)
    return found is not None and f"{module}.".startswith(f"{found[1]}.")


def _working(name: str, version: str) -> Finding:
    package = PACKAGES[name]
    text = f"{version} ({package.purpose})"
    if package.tested is None or was_tested(version, package.tested):
        return Finding(name, "ok", text)
    advice = "tested with " + " to ".join(dict.fromkeys(package.tested))
    untried = versions.untried(versions.installed()) if name == "vllm" else None
    return Finding(name, "note", text, untried or advice)


def _broken(name: str, version: str | None, fault: str, needed: bool, without_gpus: bool) -> Finding:
    driver = re.search(r"libcuda|libnvidia|nvidia driver|cuda driver|no cuda|cuda is not available", fault, re.I)
    text = f"{version or ''} does not import: {fault}".strip()
    if name in NEED_A_DRIVER and without_gpus and driver:
        return Finding(name, "not checked", text, "it needs a GPU's driver: run this on a node that has one")
    advice = "install it again"
    if "No module named" in fault:
        advice = "install what it lacks"
    elif name in NEED_A_DRIVER:
        advice = "built for another torch or CUDA? Install it again"
    return Finding(name, "missing" if needed else "note", text, advice)


def release(version: str) -> tuple[int, ...]:
    """`(2, 13, 0)` of `2.13.0+cpu`; empty of what is no version."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def was_tested(version: str, tested: tuple[str, str]) -> bool:
    """Whether a version is in a range; 5.10 as the end of one stands for all of its releases."""
    lowest, highest = map(release, tested)
    return lowest <= release(version) and release(version)[: len(highest)] <= highest
