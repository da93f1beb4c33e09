"""Starts a worker of this package with torchrun and compares what it returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from oar_plugin.passes.request import IMPORTANCE
from tests.limits import PROCESS_S


def launch(which: str, processes: int, folder: Path, worker: str = "worker") -> dict:
    target = folder / f"{which}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*command, "-m", f"tests.hosts.engine.{worker}", which, str(folder), str(target)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        cwd=root,
        timeout=2 * PROCESS_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return torch.load(target, weights_only=False)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return ((got - want).abs().max() / want.max()).item()


def worst(result: dict, want: dict[int, torch.Tensor]) -> float:
    """Largest error over the scored rows of one engine's result; all other rows must be zero."""
    errors = [0.0]
    for place, row in enumerate(result["rows"]):
        if row in want:
            errors.append(error(result[IMPORTANCE][place], want[row]))
        else:
            assert not result[IMPORTANCE][place].any()
    return max(errors)
