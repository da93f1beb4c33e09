"""A batch of rollouts whose responses are demonstrations: a model with random weights writes no answers."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.learning.rollout import Rollout, roll_out
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.words import PAD

TASK = replace(TASKS["parallel"], steps=2, filler=(1, 2))


def demonstrated(model, prompts: int = 2, copies: int = 2) -> Rollout:
    rng, problems = random.Random(0), []

    def demonstrations(model, prompt_BP, copies, max_new_tokens, generator):
        rows = []
        for number in range(len(prompt_BP) * copies):
            problem = problems[number // copies]
            rows.append(TASK.demonstration(problem, rng, 0.0 if number % 2 else 1.0))
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])

    class Remembering(type(TASK)):
        def problem(self, rng):
            problems.append(super().problem(rng))
            return problems[-1]

    task = Remembering(TASK.name, TASK.steps, TASK.filler, TASK.error_rate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.learning.rollout.sample", demonstrations)
        return roll_out(model, task, rng, torch.Generator(), prompts, copies)
