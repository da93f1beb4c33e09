"""The responses that estimators are judged on, and the micro-batches that they see them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.probe import AnswerRows, Probe, answer_rows

SIGMA = 1e-3
"""Noise of `oar_g`, as published."""


@dataclass(frozen=True)
class Response:
    """A sampled response whose answer was found, with some reasoning before it.

    Attributes:
        token_T: int64 `[T]`, prompt and response.
        segments_T: int64 `[T]` of `Segment`; the prompt is OUTSIDE.
        prompt_length: tokens of the prompt.
        texts: of every token, for display.
        correct: whether the answer is right; None where nobody knows.
        causal_T: bool `[T]`, the tokens that decide the answer; None where nobody knows.
    """

    token_T: Tensor
    segments_T: Tensor
    prompt_length: int
    texts: tuple[str, ...]
    correct: bool | None = None
    causal_T: Tensor | None = None

    @property
    def reasoning_R(self) -> Tensor:
        """Positions of the reasoning tokens, int64 `[R]`."""
        return (self.segments_T == Segment.REASONING).nonzero()[:, 0]

    @property
    def answer(self) -> tuple[int, int]:
        """Where the answer stands, `[start, end)`."""
        at = (self.segments_T == Segment.ANSWER).nonzero()[:, 0]
        return int(at[0]), int(at[-1]) + 1


@dataclass(frozen=True)
class MicroBatch:
    """What an estimator scores: responses of about one length, padded on the right.

    Attention is causal, so that no real token sees the padding.

    Attributes:
        responses: B of them.
        token_BT: int64 `[B, T]`.
        segments_BT: int64 `[B, T]` of `Segment`; prompts and padding are OUTSIDE.
        replacement_token: what a masked copy holds (`perturbation.replacement=pad`).
        probe: the outcome that is watched.
        seed: of signs, noise and draws.
    """

    responses: tuple[Response, ...]
    token_BT: Tensor
    segments_BT: Tensor
    replacement_token: int
    probe: Probe
    seed: int

    @property
    def reasoning_BT(self) -> Tensor:
        """bool `[B, T]`."""
        return self.segments_BT == Segment.REASONING

    @property
    def mask_BT(self) -> Tensor:
        """bool `[B, T]`, false at padding."""
        length_B = torch.tensor([len(row.token_T) for row in self.responses], device=self.token_BT.device)
        return torch.arange(self.token_BT.shape[1], device=self.token_BT.device) < length_B[:, None]

    def rows(self) -> AnswerRows:
        """The rows that the probe reads, in positions of the flattened `[B * T]` batch."""
        rows, length = self.token_BT.shape
        return answer_rows(
            (self.segments_BT == Segment.ANSWER).flatten(),
            torch.arange(rows).repeat_interleave(length).to(self.token_BT.device),
            self.token_BT.flatten(),
            rows,
            self.probe,
        )


def micro_batches(
    responses: Sequence[Response],
    size: int,
    pad_token: int,
    seed: int,
    device: torch.device,
    probe: Probe = "answer_mean",
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Cut responses into micro-batches, neighbours in length together.

    Yields:
        The indices of the responses, and the micro-batch of them.
    """
    order = sorted(range(len(responses)), key=lambda index: len(responses[index].token_T))
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        rows = [responses[index] for index in chosen]
        token_BT = torch.nn.utils.rnn.pad_sequence([row.token_T for row in rows], True, pad_token)
        segments_BT = torch.nn.utils.rnn.pad_sequence([row.segments_T for row in rows], True, int(Segment.OUTSIDE))
        yield (
            chosen,
            MicroBatch(tuple(rows), token_BT.to(device), segments_BT.to(device), pad_token, probe, seed),
        )
