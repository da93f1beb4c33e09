"""Rollouts whose responses are demonstrations, every other one right: a model with random weights writes no answers."""

import random

import pytest
import torch

from benchmarks.learning.rollout import roll_out
from benchmarks.tiny.tasks import Parallel
from benchmarks.tiny.words import PAD

_ASKED = {}


class Remembering(Parallel):
    def problem(self, rng):
        problem = super().problem(rng)
        return _ASKED.setdefault(problem.prompt, problem)


TASK = Remembering("parallel", steps=2, filler=(1, 2), error_rate=0.2)


def demonstrations(model, prompt_BP, copies, max_new_tokens, generator):
    """In place of `sample`."""
    rng, prompts = random.Random(0), [tuple(ids) for ids in prompt_BP.tolist() for _ in range(copies)]
    rows = [TASK.demonstration(_ASKED[prompt], rng, 1.0 - number % 2) for number, prompt in enumerate(prompts)]
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def demonstrated(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.learning.rollout.sample", demonstrations)
        return roll_out(model, TASK, random.Random(0), torch.Generator(), prompts=2, copies=2)
