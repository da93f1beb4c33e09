"""One batch of rollouts: sampled, graded, and laid out as the importance pass and the update want it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.tiny.model import sample
from benchmarks.tiny.tasks import Reading, Task
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status


@dataclass(frozen=True)
class Graded:
    """What a batch of rollouts says about the policy, whether or not it teaches anything.

    Attributes:
        reward: share of right responses.
        answered: share with an answer.
        length: mean tokens of a response.
        tokens: of all responses.
    """

    reward: float
    answered: float
    length: float
    tokens: int


@dataclass(frozen=True)
class Rollout:
    """The responses whose advantage is not zero: `B` of them, prompt and response in `L` positions.

    Attributes:
        token_BL: int64 token ids, padded at the end.
        prompt_length: of every row.
        advantage_B: group-relative advantage.
        response_BL: bool, tokens that the policy wrote.
        segments_BL: int64 of `Segment`, OUTSIDE at prompt and padding.
        status_B: int64 of `Status`.
        causal_BL: bool, the results.
        graded: of the whole batch, rows without an advantage included.
    """

    token_BL: Tensor
    prompt_length: int
    advantage_B: Tensor
    response_BL: Tensor
    segments_BL: Tensor
    status_B: Tensor
    causal_BL: Tensor
    graded: Graded

    def __len__(self) -> int:
        return len(self.token_BL)

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
    """Sample `copies` responses to each of `prompts` new problems.

    Args:
        model: the policy.
        task: of the problems.
        rng: of the problems.
        noise: of the sampling.
        prompts: problems.
        copies: responses to each; its group for the advantage, `(r - mean) / (std + 1e-6)` as verl's GRPO has it.
    """
    problems = [task.problem(rng) for _ in range(prompts)]
    prompt_BP = torch.tensor([problem.prompt for problem in problems])
    response_BR = sample(model, prompt_BP, copies, task.max_response_length, noise)
    rows = response_BR.tolist()
    readings = [task.read(problems[row // copies], rows[row]) for row in range(len(rows))]
    reward_PG = torch.tensor(_rewards(readings)).view(prompts, copies)
    spread_P1 = reward_PG.std(1, keepdim=True)
    advantage_B = ((reward_PG - reward_PG.mean(1, keepdim=True)) / (spread_P1 + 1e-6)).flatten()
    lengths = [reading.length for reading in readings]
    graded = Graded(
        reward_PG.mean().item(),
        sum(reading.segments is not None for reading in readings) / len(readings),
        sum(lengths) / len(lengths),
        sum(lengths),
    )
    used_N = advantage_B.nonzero()[:, 0]
    return _lay_out(
        torch.cat([prompt_BP.repeat_interleave(copies, 0), response_BR], 1)[used_N],
        prompt_BP.shape[1],
        advantage_B[used_N],
        [readings[row] for row in used_N.tolist()],
        graded,
    )


def _rewards(readings: list[Reading]) -> list[float]:
    return [float(reading.right) for reading in readings]


def _lay_out(
    token_BL: Tensor, prompt_length: int, advantage_B: Tensor, readings: list[Reading], graded: Graded
) -> Rollout:
    length_B1 = torch.tensor([[prompt_length + reading.length] for reading in readings])
    position_L = torch.arange(token_BL.shape[1])
    segments_BL = torch.full_like(token_BL, int(Segment.OUTSIDE))
    causal_BL = torch.zeros(token_BL.shape, dtype=torch.bool)
    status = []
    for row, reading in enumerate(readings):
        causal_BL[row, [prompt_length + position for position in reading.causal]] = True
        if not reading.ended:
            status.append(Status.TRUNCATED)
        elif reading.segments is None:
            status.append(Status.NO_ANSWER)
        elif not (reading.segments == Segment.REASONING).any():
            status.append(Status.NO_REASONING)
        else:
            status.append(Status.SCORED)
            end = prompt_length + reading.length
            segments_BL[row, prompt_length:end] = torch.from_numpy(reading.segments).long()
    return Rollout(
        token_BL,
        prompt_length,
        advantage_B,
        (position_L >= prompt_length) & (position_L < length_B1) if len(readings) else causal_BL,
        segments_BL,
        torch.tensor([int(s) for s in status], dtype=torch.long),
        causal_BL,
        graded,
    )
