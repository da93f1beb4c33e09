"""Can one response be scored, and which of its tokens are what?"""

from collections.abc import Collection, Sequence

import numpy as np

from oar_plugin.credit.answer import AnswerFinder, Segment, segment_tokens
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.tokens import TokenBytes


def segment_response(
    ids: Sequence[int],
    own: np.ndarray,
    finder: AnswerFinder,
    token_bytes: TokenBytes,
    eos_ids: Collection[int],
    max_response_length: int,
    max_answer_tokens: int,
) -> tuple[np.ndarray, Status]:
    """Segments of one response, and whether it can be scored.

    Args:
        ids: its tokens.
        own: bool `[L]`, the model's own tokens.
        finder: from `make_finder`.
        token_bytes: the model's tokenizer.
        eos_ids: tokens that end a response.
        max_response_length: a response as long as this that does not end in one of them is truncated.
        max_answer_tokens: an answer of more tokens is none.

    Returns:
        int8 `[L]` (OUTSIDE everywhere unless the status is SCORED) and the status.
    """
    nothing = np.full(len(ids), Segment.OUTSIDE, dtype=np.int8)
    if len(ids) >= max_response_length and ids[-1] not in eos_ids:
        return nothing, Status.TRUNCATED
    found = segment_tokens(token_bytes.pieces(ids), finder, own)
    if found is None:
        return nothing, Status.NO_ANSWER
    if not (found == Segment.REASONING).any():
        return nothing, Status.NO_REASONING
    if (found == Segment.ANSWER).sum() > max_answer_tokens:
        return nothing, Status.ANSWER_TOO_LONG
    return found, Status.SCORED
