"""Importances and rewards that fail like a user's own. A reward fails for about every ninth response."""

import functools
import zlib

import torch

from benchmarks.tiny import data
from oar_plugin.credit.importance.fisher import Fisher


class OutOfMemory(Fisher):
    name = "out_of_memory"
    help = "Runs out of memory in its first call of a run; the trial at the start has 7 tokens."
    calls = 0

    def coefficients(self, number, rows):
        OutOfMemory.calls += rows.logits_NV.shape[-1] > 7
        if OutOfMemory.calls == 1:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return super().coefficients(number, rows)


class Raises(Fisher):
    name = "raises"
    help = "Raises in training, and not in the trial at the start."

    def coefficients(self, number, rows):
        if rows.logits_NV.shape[-1] > 7:
            raise ZeroDivisionError("an importance of a user's own that fails")
        return super().coefficients(number, rows)


def sometimes(fault):
    @functools.wraps(data.compute_score)
    def compute_score(data_source, solution_str, ground_truth, **more):
        if zlib.crc32(solution_str.encode()) % 9 == 0:
            return fault()
        return data.compute_score(data_source, solution_str, ground_truth, **more)

    return compute_score


raises = sometimes(lambda: 1 / 0)
not_a_number = sometimes(lambda: {"score": float("nan"), "acc": 0.0})
a_string = sometimes(lambda: "right")
