"""The machine that is measured on: its description, its threads, its clock."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

Device = Literal["auto", "cpu", "cuda"]


def check_device(name: str) -> None:
    """Raises: ValueError when `--device NAME` cannot be had."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch sees no CUDA device; allowed here: cpu, auto")


def choose_device(name: str) -> torch.device:
    """The device that `--device NAME` asks for; `auto` takes CUDA where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Wall seconds and processor seconds of this process that `work` takes, the device's work included in the first."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """torch with that many CPU threads; None leaves the number alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on: versions, processor, accelerator, and how busy the machine was."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "accelerator": torch.cuda.get_device_name(device) if cuda else None,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_before": load_average(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "transformers": transformers.__version__,
    }


def load_average() -> list[float]:
    """Of 1, 5 and 15 minutes."""
    return [round(x, 2) for x in os.getloadavg()]


def machine_line(machine: dict[str, Any]) -> str:
    """Where it was measured: `machine` as `describe_machine` has it, with `load_average_after`."""
    on_cpu = f"{machine['cpu']}, {machine['torch_threads']} threads on {machine['cores']} cores"
    return (
        f"{machine['accelerator'] or on_cpu}; torch {machine['torch']}, transformers {machine['transformers']}, Python "
        f"{machine['python']}. Load average (1, 5, 15 minutes) before {machine['load_average_before']}, after "
        f"{machine['load_average_after']}."
    )
