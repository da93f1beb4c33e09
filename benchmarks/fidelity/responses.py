"""The responses that estimators are judged on, and the micro-batches that they see them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.probe import AnswerRows, Probe, answer_rows


@dataclass(frozen=True)
class Response:
    """A response with an answer and R reasoning tokens before it; T tokens with its prompt.

    `texts` and `segments` (`Segment`) are of its `tokens`, `causal` are positions in them of those that decide the answer.
    """

    prompt: Sequence[int]
    prompt_text: str
    tokens: Sequence[int]
    texts: Sequence[str]
    segments: np.ndarray
    correct: bool | None = None
    causal: Sequence[int] | None = None
    """Like `correct` None where nobody knows."""

    @property
    def token_T(self) -> Tensor:
        return torch.tensor([*self.prompt, *self.tokens])

    @property
    def segments_T(self) -> Tensor:
        """int64 of `Segment`; the prompt is OUTSIDE."""
        return torch.tensor([int(Segment.OUTSIDE)] * len(self.prompt) + self.segments.tolist())

    @property
    def reasoning_R(self) -> Tensor:
        """Positions of the reasoning tokens, the prompt counted."""
        return (self.segments_T == Segment.REASONING).nonzero()[:, 0]

    @property
    def causal_R(self) -> Tensor | None:
        """Which reasoning tokens decide the answer, bool; None where nobody knows."""
        return (
            None if self.causal is None else torch.isin(self.reasoning_R - len(self.prompt), torch.tensor(self.causal))
        )

    @property
    def answer(self) -> tuple[int, int]:
        """Where the answer stands, `[start, end)`, the prompt counted."""
        at = (self.segments_T == Segment.ANSWER).nonzero()[:, 0]
        return int(at[0]), int(at[-1]) + 1


@dataclass(frozen=True)
class MicroBatch:
    """What an estimator scores: B responses of about one length, padded on the right, where causal attention does not look.

    Attributes:
        responses: B of them.
        token_BT: int64.
        segments_BT: int64 of `Segment`; prompts and padding are OUTSIDE.
        mask_BT: bool, false at padding.
        replacement_token: what a masked copy holds.
        probe: the outcome that is watched.
        rows: that it reads, in positions of the flattened batch.
        seed: of signs, noise and draws.
    """

    responses: tuple[Response, ...]
    token_BT: Tensor
    segments_BT: Tensor
    mask_BT: Tensor
    replacement_token: int
    probe: Probe
    rows: AnswerRows
    seed: int


def micro_batches(
    responses: Sequence[Response], size: int, pad_token: int, device: torch.device, probe: Probe, seed: int
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Cut responses into micro-batches, neighbours in length together: the indices of the responses, and their batch."""
    length_N = [len(response.prompt) + len(response.tokens) for response in responses]
    by_length = sorted(range(len(responses)), key=lambda index: length_N[index])
    for at in range(0, len(by_length), size):
        chosen = by_length[at : at + size]
        rows = tuple(responses[index] for index in chosen)
        token_BT = pad_sequence([row.token_T for row in rows], True, pad_token).to(device)
        segments_BT = pad_sequence([row.segments_T for row in rows], True, int(Segment.OUTSIDE)).to(device)
        length_B1 = torch.tensor([[length_N[index]] for index in chosen], device=device)
        mask_BT = torch.arange(token_BT.shape[1], device=device) < length_B1
        response_T = torch.arange(len(rows), device=device).repeat_interleave(token_BT.shape[1])
        answer_T = (segments_BT == Segment.ANSWER).flatten()
        read = answer_rows(answer_T, response_T, token_BT.flatten(), len(rows), probe)
        yield chosen, MicroBatch(rows, token_BT, segments_BT, mask_BT, pad_token, probe, read, seed)
