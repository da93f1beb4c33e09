"""The made responses as those who score copies of them want them, and which of their units are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.tiny.random_models import Batch
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.perturbation import Unit, units


@dataclass(frozen=True)
class Response:
    """One sequence of a batch.

    Attributes:
        row: its place in the batch.
        token_ids: prompt and response up to the end of the answer: what follows cannot move it.
        prompt_length: tokens of the prompt in it.
        answer_start: index in `token_ids` of the answer's first token; it runs to their end.
        reasoning: one a response token, what follows the answer included.
    """

    row: int
    token_ids: tuple[int, ...]
    prompt_length: int
    answer_start: int
    reasoning: tuple[bool, ...]

    @property
    def length(self) -> int:
        """Tokens of the whole response."""
        return len(self.reasoning)

    def units(self, span: int, at_most: int | None) -> Units:
        """Runs of `span` reasoning tokens, all or `at_most` evenly spaced ones."""
        every = units(self.reasoning, span)
        return Units(evenly_spaced(every, at_most), len(every))


@dataclass(frozen=True)
class Units:
    """What is measured of a response.

    Attributes:
        chosen: the units that are measured.
        every: how many there are.
    """

    chosen: list[Unit]
    every: int


def evenly_spaced(unit_list: Sequence[Unit], at_most: int | None) -> list[Unit]:
    """All, or the middles of `at_most` equal parts: copies of these compute as many tokens on average as of all."""
    count = len(unit_list)
    if at_most is None or at_most >= count:
        return list(unit_list)
    return [unit_list[(2 * part + 1) * count // (2 * at_most)] for part in range(at_most)]


def made_responses(batch: Batch, segments_BL: Tensor) -> list[Response]:
    """The responses of a batch.

    Args:
        batch: the sequences.
        segments_BL: int64 `[B, L]` of `Segment`, prompts included.
    """
    found = []
    for row, (token_L, segments_L) in enumerate(zip(batch.token_BL.cpu(), segments_BL.cpu(), strict=True)):
        answer = (segments_L == Segment.ANSWER).nonzero()[:, 0]
        reasoning_L = segments_L[batch.prompt_length :] == Segment.REASONING
        found.append(
            Response(
                row,
                tuple(token_L[: int(answer[-1]) + 1].tolist()),
                batch.prompt_length,
                int(answer[0]),
                tuple(reasoning_L.tolist()),
            )
        )
    return found
