"""The GPUs of this machine, as torch sees them, and what of a recipe fits on them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oar_plugin.cli.doctor.questions import Answer
from oar_plugin.runs.launch.finding import Finding

GIB = 2**30
DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"), Path("/dev/kfd"))


class Machine:
    """What `ask("devices")` told."""

    def __init__(self, answer: Answer) -> None:
        self.fault = answer.fault
        self.torch: str = answer.told.get("torch", "")
        self.gpus: list[dict[str, Any]] = answer.told.get("gpus", [])
        self.built_for: str | None = answer.told.get("built for")  # CUDA's or ROCm's version; None: for the CPU
        self.why_not: str = answer.told.get("why not", "")
        asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
        # As verl_cpu decides it.
        self.on_cpu = bool(self.torch) and not self.gpus and (asked == "cpu" or (not asked and self.built_for is None))

    @property
    def without_gpus(self) -> bool:
        """Whether the run's GPUs are elsewhere, or torch cannot tell: what needs a driver may not import here."""
        return not self.gpus and not self.on_cpu

    @property
    def memory_gib(self) -> float | None:
        """Of the smallest GPU; None where none is visible."""
        return min((gpu["total"] / GIB for gpu in self.gpus), default=None)

    def examine(self, share: float | None = None) -> Iterator[Finding]:
        """`share` of a GPU's memory that the rollout engine of a recipe asks for when it starts."""
        if self.gpus:
            names = ", ".join(sorted({gpu["name"] for gpu in self.gpus}))
            yield Finding("GPUs", "ok", f"{len(self.gpus)} x {names}, {self.memory_gib:.1f} GiB each at least")
            taken = [i for i, gpu in enumerate(self.gpus) if gpu["free"] < 0.9 * gpu["total"]]
            full = [i for i, gpu in enumerate(self.gpus) if share and gpu["free"] < share * gpu["total"]]
            if taken or full:
                free = ", ".join(f"{self.gpus[i]['free'] / GIB:.0f} GiB of GPU {i}" for i in sorted({*taken, *full}))
                advice = "another process has the rest: nvidia-smi names it"
                yield Finding("GPU memory", "missing" if full else "note", f"only {free} are free", advice)
        elif self.fault or not self.torch:
            yield Finding("GPUs", "not checked", f"torch did not say: {self.fault}")
        elif self.on_cpu:
            text = "none: the CPU stack is used (demo and tests; small models only)"
            yield Finding("GPUs", "note", text)
        elif any(path.exists() for path in DRIVER):
            text = f"the machine has a GPU's driver, and torch {self.torch} sees no GPU: {self.why_not or 'no reason given'}"
            advice = f"a driver for CUDA {self.built_for} or newer, CUDA_VISIBLE_DEVICES, or the container's --gpus"
            yield Finding("GPUs", "missing", text, advice)
        else:
            text = "none is visible: GPUs, their memory and what is compiled for them were not checked"
            yield Finding(
                "GPUs", "not checked", text, "run this on a node with GPUs; VERL_PLATFORM=cpu is for the CPU stack"
            )
