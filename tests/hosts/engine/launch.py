"""Starts a worker of this package with torchrun and compares what it returns."""

from pathlib import Path
from typing import Any

import torch

from oar_plugin.passes.request import IMPORTANCE
from tests.limits import PROCESS_S
from tests.torchrun import torchrun

WORKERS = {"single": ("worker", 1), "double": ("worker", 2), "megatron": ("megatron_worker", 2)}
WORKERS["eight"] = ("megatron_worker", 8)


def launch(table: str, root: Path) -> dict[str, Any]:
    """The results of a table's cases, and of what else its worker looks at."""
    worker, processes = WORKERS[table]
    target, folder = root / f"{table}.pt", root / ("fsdp" if worker == "worker" else "megatron")
    torchrun(f"tests.hosts.engine.{worker}", (table, folder, target), processes, 2 * PROCESS_S)
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
