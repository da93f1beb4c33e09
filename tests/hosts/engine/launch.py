"""Starts a worker of this package with torchrun and compares what it returns."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from oar_plugin.passes.request import IMPORTANCE
from tests.limits import PROCESS_S

WORKERS = {"single": ("worker", 1), "double": ("worker", 2), "megatron": ("megatron_worker", 2)}
WORKERS["eight"] = ("megatron_worker", 8)


def launch(table: str, root: Path) -> dict[str, Any]:
    """The results of a table's cases, and of what else its worker looks at."""
    worker, processes = WORKERS[table]
    target, folder = root / f"{table}.pt", root / ("fsdp" if worker == "worker" else "megatron")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    here = Path(__file__).parents[3]
    done = subprocess.run(
        [*command, "-m", f"tests.hosts.engine.{worker}", table, str(folder), str(target)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)},
        cwd=here,
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


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict):
        if before.keys() != after.keys():
            return [path]
        return [d for k in before for d in differences(before[k], after[k], f"{path}/{k}")]
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return [] if torch.equal(before, after) else [path]
    return [] if before == after else [path]
