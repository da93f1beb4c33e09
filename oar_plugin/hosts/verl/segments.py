"""Which responses of a verl batch to score, and which of their tokens are what."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.request import NEEDED, Request
from oar_plugin.tokens import TokenBytes

SEQUENCE_SEGMENTS = "oar_sequence_segments"  # int64, one a token of prompt + response; OUTSIDE in rows not scored


def segment_batch(
    data: TensorDict, request: Request, token_bytes: TokenBytes, eos_ids: Collection[int]
) -> tuple[list[Tensor], Tensor]:
    """Segments and status of every row.

    Args:
        data: a batch with the nested fields `responses`, `response_mask` and `oar_needed`.
        request: what to score.
        token_bytes: the model's tokenizer.
        eos_ids: tokens that end a response.

    Returns:
        int8 `[L_i]` segments for each row (OUTSIDE where a row is not to be scored), and int64 `[B]` of `Status`.
    """
    finder = make_finder(request.answer_patterns)
    segments, status = [], []
    rows = zip(data["responses"].unbind(), data["response_mask"].unbind(), data[NEEDED].unbind(), strict=True)
    for response, mask, needed in rows:
        found, state = None, Status.NOT_NEEDED
        if bool(needed.any()):
            ids = response.tolist()
            truncated = len(ids) >= request.max_response_length and ids[-1] not in eos_ids
            own = mask.cpu().numpy().astype(bool)
            found = segment_tokens(token_bytes.pieces(ids), finder, own)
            if truncated:
                state = Status.TRUNCATED
            elif found is None:
                state = Status.NO_ANSWER
            elif not (found == Segment.REASONING).any():
                state = Status.NO_REASONING
            else:
                state = Status.SCORED
        if state is not Status.SCORED or found is None:
            found = np.full(len(response), Segment.OUTSIDE, dtype=np.int8)
        segments.append(torch.from_numpy(found))
        status.append(int(state))
    return segments, torch.tensor(status)


def sequence_segments(segments: Sequence[Tensor], input_ids: Tensor) -> Tensor:
    """Extend segments of responses to whole sequences (prompt tokens are OUTSIDE), nested int64 like `input_ids`."""
    lengths = [len(row) for row in input_ids.unbind()]
    rows = [
        torch.nn.functional.pad(segment.long(), (length - len(segment), 0), value=int(Segment.OUTSIDE))
        for segment, length in zip(segments, lengths, strict=True)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
