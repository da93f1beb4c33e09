"""Finds the answer of each response, and says why a response cannot be scored."""

import functools
import logging
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oar_plugin.credit.answer import AnswerFinder, SearchFailed, Segment, make_finder, segment_tokens
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.request import Request
from oar_plugin.passes.tokens import TokenBytes

logger = logging.getLogger(__name__)

SLOW_SECONDS, LOST_SECONDS = 0.1, 20.0
"""Failed or slow searches of one batch may take `LOST_SECONDS` together; its other responses then fall back without a search.
A search takes microseconds, unless a user's own pattern does not fit the text."""


class LostTime:
    """Counts the seconds of a batch's searches that failed or were slow."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def spent(self) -> bool:
        return self._seconds > LOST_SECONDS

    def count(self, seconds: float, status: Status) -> None:
        if status == Status.SEARCH_FAILED or seconds > SLOW_SECONDS:
            self._seconds += seconds


def segment_rows(
    rows: Iterable[tuple[Sequence[int], np.ndarray, bool]],
    request: Request,
    token_bytes: TokenBytes,
    eos_ids: Collection[int],
) -> tuple[list[Tensor], Tensor]:
    """Segments and status of a batch's responses.

    Args:
        rows: for each response its tokens, which of them are the model's own (bool `[L_i]`), and whether to score it.
        request: the patterns of answers, and how long responses and answers may be.
        token_bytes: the model's tokenizer.
        eos_ids: tokens that end a response.

    Returns:
        int8 `[L_i]` segments for each row (OUTSIDE where a row is not to be scored), and int64 `[B]` of `Status`.
    """
    finder, longest = make_finder(request.answer_patterns), (request.max_response_length, request.max_answer_tokens)
    segments, status, lost = [], [], LostTime()
    for ids, own, needed in rows:
        segments_L, state = np.full(len(ids), Segment.OUTSIDE, dtype=np.int8), Status.NOT_NEEDED
        if needed:
            segments_L, state = segment_response(ids, own, finder, token_bytes, eos_ids, *longest, lost)
        segments.append(torch.from_numpy(segments_L))
        status.append(int(state))
    return segments, torch.tensor(status, dtype=torch.long)


def end_of_sequence_tokens(tokenizer: Any, generation_config: Any) -> set[int]:
    """Tokens that end a response: the tokenizer's, and those of the model's generation config."""
    tokens = {tokenizer.eos_token_id}
    generation = getattr(generation_config, "eos_token_id", None)
    tokens.update(generation if isinstance(generation, list) else [generation])
    return {token for token in tokens if token is not None}


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
    """Returns the segments of one response, int8 `[L]` (OUTSIDE everywhere unless it can be scored), and its status.

    Args:
        ids, own: its tokens, and bool `[L]`, which of them are the model's own.
        finder: from `make_finder`.
        max_response_length: a response of so many tokens that does not end in one of `eos_ids` is truncated.
        max_answer_tokens: a response with a longer answer is not scored.
        lost: of the batch.
    """
    nothing = np.full(len(ids), Segment.OUTSIDE, dtype=np.int8)
    if len(ids) >= max_response_length and ids[-1] not in eos_ids:
        return nothing, Status.TRUNCATED
    if lost.spent():
        _warn_once(f"failed or slow searches of a batch took {LOST_SECONDS:g} s; its others are not searched")
        return nothing, Status.SEARCH_FAILED
    segments_L, status, started = None, Status.NO_ANSWER, time.perf_counter()
    try:
        pieces, started = _pieces(token_bytes, ids), time.perf_counter()  # decoding is no search, unless it fails
        segments_L = segment_tokens(pieces, finder, own)
    except SearchFailed as error:
        _warn_once(str(error))
        status = Status.SEARCH_FAILED
    lost.count(time.perf_counter() - started, status)
    if segments_L is None:
        return nothing, status
    if not (segments_L == Segment.REASONING).any():
        return nothing, Status.NO_REASONING
    if (segments_L == Segment.ANSWER).sum() > max_answer_tokens:
        return nothing, Status.ANSWER_TOO_LONG
    return segments_L, Status.SCORED


def _pieces(token_bytes: TokenBytes, ids: Sequence[int]) -> list[bytes]:
    try:
        return token_bytes.pieces(ids)
    except Exception as error:  # a model's own tokenizer runs code of its own
        raise SearchFailed(f"the tokenizer raised {type(error).__name__}") from error


@functools.cache
def _warn_once(error: str) -> None:
    """Warns, with the traceback if an error is being handled."""
    logger.warning("%s; such responses keep plain GRPO (search_failed)", error, exc_info=sys.exc_info()[0] is not None)
