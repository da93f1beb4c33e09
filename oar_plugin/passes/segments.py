"""Finds the answer of each response, and says why a response cannot be scored."""

import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oar_plugin.credit.answer import AnswerFinder, SearchFailed, Segment, make_finder, segment_tokens
from oar_plugin.credit.diagnostics import Status
from oar_plugin.output import warn_once
from oar_plugin.passes.request import Request
from oar_plugin.passes.tokens import TokenBytes

SLOW_SECONDS, LOST_SECONDS = 0.1, 20.0
"""When the failed and slow searches of a batch have taken `LOST_SECONDS`, its other responses fall back without a search.
A search takes microseconds, unless a user's own pattern does not fit the text."""


@dataclass
class LostTime:
    """The seconds of a batch's searches that failed or were slow."""

    seconds: float = 0.0


def segment_rows(
    rows: Iterable[tuple[Sequence[int], np.ndarray, bool, int]],
    request: Request,
    token_bytes: TokenBytes,
    eos_ids: Collection[int],
) -> tuple[list[Tensor], Tensor]:
    """Returns the segments of each response, int8 `[L_i]`, and int64 `[B]` of `Status`.

    A row has a response's tokens, a bool mask of the model's own tokens, whether to score it, and the length of its prompt.
    `eos_ids` are the tokens that end a response.
    """
    finder = make_finder(request.config.answer_patterns)
    segments, status, lost = [], [], LostTime()
    for ids, own, needed, prompt_length in rows:
        segments_L, state = np.full(len(ids), Segment.OUTSIDE, dtype=np.int8), Status.NOT_NEEDED
        if needed:
            limit = min(request.max_response_length, request.max_length - prompt_length)
            most = limit, request.config.max_answer_tokens
            segments_L, state = segment_response(ids, own, finder, token_bytes, eos_ids, *most, lost)
        segments.append(torch.from_numpy(segments_L))
        status.append(int(state))
    return segments, torch.tensor(status, dtype=torch.long)


def end_of_sequence_tokens(tokenizer: Any, generation_config: Any) -> set[int]:
    """Tokens that end a response: the tokenizer's, and those of the model's generation config."""
    generation = getattr(generation_config, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(generation if isinstance(generation, list) else [generation])} - {None}


def longest_of(config: Any) -> int:
    """Most tokens of a sequence that a model with this configuration has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def segment_response(
    ids: Sequence[int],
    own: np.ndarray,
    finder: AnswerFinder,
    token_bytes: TokenBytes,
    eos_ids: Collection[int],
    max_response_length: int,
    max_answer_tokens: int,
    lost: LostTime,
) -> tuple[np.ndarray, Status]:
    """Returns the segments of one response, int8 `[L]` (all OUTSIDE if it cannot be scored), and its status.

    `own` (bool): the model's own tokens. A response of `max_response_length` tokens without one of `eos_ids` at the end is cut.
    """
    nothing = np.full(len(ids), Segment.OUTSIDE, dtype=np.int8)
    if ids and len(ids) >= max_response_length and ids[-1] not in eos_ids:
        return nothing, Status.TRUNCATED
    if lost.seconds > LOST_SECONDS:
        warn_once("failed or slow searches of a batch took %g s; the others keep plain GRPO", LOST_SECONDS)
        return nothing, Status.SEARCH_FAILED
    segments_L, status, started = None, Status.NO_ANSWER, time.perf_counter()
    try:
        try:
            pieces = token_bytes.pieces(ids)
        except Exception as error:  # a model's own tokenizer runs code of its own
            raise SearchFailed(f"the tokenizer raised {type(error).__name__}") from error
        started = time.perf_counter()  # the time of decoding counts only if it fails
        segments_L = segment_tokens(pieces, finder, own)
    except SearchFailed as said:
        warn_once("%s; such responses keep plain GRPO", str(said), exc_info=True)
        status = Status.SEARCH_FAILED
    seconds = time.perf_counter() - started
    if status == Status.SEARCH_FAILED or seconds > SLOW_SECONDS:
        lost.seconds += seconds
    if segments_L is None:
        return nothing, status
    if not (segments_L == Segment.REASONING).any():
        return nothing, Status.NO_REASONING
    if (segments_L == Segment.ANSWER).sum() > max_answer_tokens:
        return nothing, Status.ANSWER_TOO_LONG
    return segments_L, Status.SCORED
