"""One batch of rollouts: sampled, graded, and laid out as the importance pass and the update want it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.tiny.model import sample
from benchmarks.tiny.tasks import Task
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status


@dataclass(frozen=True)
class Rollout:
    """The responses whose advantage is not zero: `B` of them, prompt and response in `L` positions.

    `graded` is of the whole batch, rows without an advantage included: reward (share of right responses), length (mean tokens
    of a response) and tokens (of all responses).
    """

    advantage_B: Tensor  # group-relative
    token_BL: Tensor  # int64 ids, padded at the end
    response_BL: Tensor  # bool, tokens that the policy wrote
    segments_BL: Tensor  # int64 of `Segment`, OUTSIDE at prompt and padding, and in a response that is not scored
    status_B: Tensor  # int64 of `Status`
    causal_BL: Tensor  # bool, the results that the answer follows from
    prompt_length: int  # of every row
    graded: dict[str, float]

    @property
    def reasoning_BL(self) -> Tensor:
        """Bool, the tokens to reshape: the reasoning of responses that have an answer."""
        return self.segments_BL == Segment.REASONING

    @property
    def mask_BL(self) -> Tensor:
        """Bool, false at padding."""
        return self.response_BL | (torch.arange(self.token_BL.shape[1]) < self.prompt_length)


def roll_out(
    model: LlamaForCausalLM, task: Task, rng: random.Random, noise: torch.Generator, prompts: int, copies: int
) -> Rollout:
    """Sample `copies` responses to each of `prompts` new problems; `rng` draws the problems, `noise` the tokens.

    The advantage is `(r - mean) / (std + 1e-6)` over the responses to a problem, as verl's GRPO has it.
    """
    problems = [task.problem(rng) for _ in range(prompts)]
    prompt_BP = torch.tensor([problem.prompt for problem in problems])
    response_BR = sample(model, prompt_BP, copies, task.max_response_length, noise)
    readings = [task.read(problems[row // copies], ids) for row, ids in enumerate(response_BR.tolist())]
    reward_PG = torch.tensor([float(reading.right) for reading in readings]).view(prompts, copies)
    advantage_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-6)
    tokens = sum(reading.length for reading in readings)
    graded = {"reward": reward_PG.mean().item(), "length": tokens / len(readings), "tokens": tokens}
    token_BL = torch.cat([prompt_BP.repeat_interleave(copies, 0), response_BR], 1)
    response_BL, causal_BL = (torch.zeros(token_BL.shape, dtype=torch.bool) for _ in range(2))
    segments_BL = torch.full_like(token_BL, int(Segment.OUTSIDE))
    start = prompt_BP.shape[1]
    status_B = torch.full((len(readings),), int(Status.SCORED))
    for row, reading in enumerate(readings):
        written = slice(start, start + reading.length)
        response_BL[row, written] = True
        causal_BL[row, [start + position for position in reading.causal]] = True
        if not reading.ended:
            status_B[row] = Status.TRUNCATED
        elif reading.segments is None:
            status_B[row] = Status.NO_ANSWER
        elif not (reading.segments == Segment.REASONING).any():
            status_B[row] = Status.NO_REASONING
        else:
            segments_BL[row, written] = torch.from_numpy(reading.segments).long()
    used_B = advantage_PG.flatten() != 0
    advantage_B, token_BL, response_BL, segments_BL, status_B, causal_BL = (
        x[used_B] for x in (advantage_PG.flatten(), token_BL, response_BL, segments_BL, status_B, causal_BL)
    )
    return Rollout(advantage_B, token_BL, response_BL, segments_BL, status_B, causal_BL, start, graded)
