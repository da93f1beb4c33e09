"""Differences between results of engines, and between states of one."""

from typing import Any

import torch

from oar_plugin.passes.request import IMPORTANCE


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
