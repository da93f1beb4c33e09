"""Importances that fail like a user's own."""

import torch
from torch import Tensor

from oar_plugin.credit.importance import Parts
from oar_plugin.credit.importance.base import Rows
from oar_plugin.credit.importance.fisher import Fisher


def in_training(rows: Rows) -> bool:
    """Whether this is a run; the trial at the start has a vocabulary of 7."""
    return rows.logits_NV.shape[-1] != 7


class OutOfMemory(Fisher):
    name = "out_of_memory"
    help = "Runs out of memory once, in the third of its calls with rows."
    calls = 0

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        if in_training(rows):
            OutOfMemory.calls += 1
        if OutOfMemory.calls == 3:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return super().coefficients(number, rows)


class NotFinite(Fisher):
    name = "not_finite"
    help = "NaN for every token of the batch."

    def combine(self, parts: Parts) -> Tensor:
        tried = parts.reasoning_BL.shape == (3, 4)  # the trial at the start
        return super().combine(parts) * (1.0 if tried else float("nan"))


class Raises(Fisher):
    name = "raises"
    help = "Raises in training, and not in the trial at the start."

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        if in_training(rows):
            raise ZeroDivisionError("an importance of a user's own that fails")
        return super().coefficients(number, rows)
