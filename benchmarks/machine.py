"""The machine that is measured on: what it is and how busy, its clock, and its memory."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from benchmarks.count.meter import Meter

Device = Literal["auto", "cpu", "cuda"]


def cache_folder() -> Path:
    """Where models are kept: `oar_plugin` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oar_plugin"


def choose_device(name: str) -> torch.device:
    """The device that `--device NAME` asks for; `auto` takes CUDA where there is one.

    Raises: ValueError when it cannot be had.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device cuda: this PyTorch sees no CUDA device; allowed here: cpu, auto")
    return torch.device(("cuda" if available else "cpu") if name == "auto" else name)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on: versions, processor, accelerator, and how busy the machine was."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "accelerator": torch.cuda.get_device_name(device) if cuda else None,
        "cpu": next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine()),
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
    """A line of `describe_machine`, with `load_average_after`."""
    on_cpu = f"{machine['cpu']}, {machine['torch_threads']} threads on {machine['cores']} cores"
    return (
        f"{machine['accelerator'] or on_cpu}; torch {machine['torch']}, transformers {machine['transformers']}, Python "
        f"{machine['python']}. Load average (1, 5, 15 minutes) before {machine['load_average_before']}, after "
        f"{machine['load_average_after']}."
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Wall seconds that `work` takes, the device's work included."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `work` held at once on top of what was there before, by CUDA's allocator or `Meter`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with Meter() as meter:
        meter.begin("work")
        work()
    return int(max(meter.numbers["work"].values()))
