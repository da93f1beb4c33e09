"""`oar doctor`: is this machine ready, and if not, what to do."""

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from oar_plugin.hosts.verl import SERVED
from oar_plugin.hosts.vllm import versions

# Distribution -> what it is for, the version that was tested, how to install it.
PACKAGES = {
    "torch": ("everything", "2.13", "pip install torch"),
    "verl": ("the trainer", SERVED, f"pip install verl=={SERVED}"),
    "ray": ("the cluster", "2.60", 'pip install "ray[default]"'),
    "transformers": ("models", "5.10", 'pip install "transformers>=5.5.3,<5.11"'),
    "TransferQueue": ("verl's data plane", "0.1.11", "pip install TransferQueue==0.1.11"),
    "vllm": (
        "rollouts", "0.28",
        "pip install vllm, the release that goes with your torch (without a GPU: bash recipes/cpu_demo/run.sh)",
    ),
}  # fmt: skip
# What verl does with the plugin, in a process of its own: importing verl has side effects.
PROBE = """
import verl
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.engine import EngineRegistry
from verl.utils.device import get_device_name
engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")
print("OAR", get_trainer_cls("sync").__name__, engine.__name__, get_device_name())
"""


class Finding(NamedTuple):
    subject: str
    level: str  # ok, note or missing
    text: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 when a run with algorithm.adv_estimator=oar can start, 1 when something is missing."


def run(args: argparse.Namespace) -> int:
    findings = list(examine())
    table = Table(title="oar doctor", title_justify="left")
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold")  # a key that is cut short is of no use
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
    for subject, level, text, advice in findings:
        table.add_row(marks[level], subject, text, advice)
    Console().print(table)
    if missing := [finding.subject for finding in findings if finding.level == "missing"]:
        print(f"Not ready: {', '.join(missing)}.")
        return 1
    print("Ready: add algorithm.adv_estimator=oar to your verl command.")
    return 0


def examine() -> Iterator[Finding]:
    """All findings, in the order a person would ask."""
    python = "ok" if (3, 10) <= sys.version_info < (3, 13) else "note"
    yield Finding("Python", python, ".".join(map(str, sys.version_info[:3])), "3.11 is the tested one")
    for name, (purpose, tested, install) in PACKAGES.items():
        found = _version(name)
        if found is None:
            yield Finding(name, "missing", "not installed", install)
        elif name == "verl" and found.split("+")[0] != tested:
            yield Finding(name, "missing", found, f"OAR serves exactly verl {tested}: {install}")
        elif found.startswith(tested):
            yield Finding(name, "ok", f"{found} ({purpose})")
        else:
            yield Finding(name, "note", f"{found} ({purpose})", f"tested with {tested}")
    yield _plugin()
    if _version("torch") is not None:
        yield _devices()
    if _version("verl") is not None:  # what is served is read from settings that need verl's own packages
        yield from _served()


def _plugin() -> Finding:
    subject, policy = "entry point", os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not any(entry.name == "oar" for entry in importlib.metadata.entry_points(group="verl.plugins")):
        return Finding(subject, "missing", "not registered", "pip install . in a checkout, into this environment")
    if policy != "auto" and "oar" not in [name.strip() for name in policy.split(",")]:
        advice = "unset it, or add oar to it, on every node"
        return Finding(subject, "missing", f"VERL_USE_EXTERNAL_PLUGINS={policy}", advice)
    if _version("verl") is None:
        return Finding(subject, "note", "registered")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=300)
    line = next((line for line in done.stdout.splitlines() if line.startswith("OAR ")), "")
    if line.startswith("OAR Oar"):
        _, trainer, engine, device = line.split()
        return Finding(subject, "ok", f"loaded by verl: {trainer}, {engine} on {device}")
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(subject, "missing", f"verl did not load it: {said}", 'python -c "import verl" shows the whole error')


def _devices() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Finding("devices", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    if torch.version.cuda is None or os.environ.get("VERL_PLATFORM") == "cpu":
        return Finding("devices", "note", "no accelerator: the CPU stack is used (demo and tests; small models only)")
    advice = "run on a node with a GPU, or set VERL_PLATFORM=cpu to use the CPU stack"
    return Finding("devices", "missing", "no accelerator, and torch is built for one", advice)


def _served() -> Iterator[Finding]:
    from oar_plugin.credit.importance import of_engines
    from oar_plugin.hosts.verl.settings import MEGATRON_TESTED, STRATEGIES, TRAINER_MODES

    yield Finding("trainers", "ok", f"trainer.v1.trainer_mode: {', '.join(TRAINER_MODES)}")
    yield Finding("engines", "ok", f"actor_rollout_ref.actor.strategy: {', '.join(STRATEGIES)}")
    core = _version("megatron-core")
    if core is None:
        yield Finding("megatron", "note", "no megatron-core: actor_rollout_ref.actor.strategy=megatron needs it")
    else:
        tested = core.startswith(MEGATRON_TESTED)
        advice = "" if tested else f"tested with {MEGATRON_TESTED}x"
        yield Finding("megatron", "ok" if tested else "note", f"megatron-core {core}", advice)
    vllm, oar_p = _version("vllm"), f"importance={of_engines()}"
    if reason := versions.unsupported(vllm):
        yield Finding("offload", "note", reason, f"{oar_p} works with perturbation.backend=actor")
    else:
        yield Finding("offload", "ok", f"{oar_p}, perturbation.backend=rollout: on vLLM {vllm}")


def _version(distribution: str) -> str | None:
    if distribution == "vllm":  # its build for CPUs has another name
        return versions.installed()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
