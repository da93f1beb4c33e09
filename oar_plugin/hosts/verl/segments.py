"""Which responses of a verl batch to score, and which of their tokens are what."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.request import NEEDED, Request
from oar_plugin.passes.segments import segment_response
from oar_plugin.passes.tokens import TokenBytes

SEQUENCE_SEGMENTS = "oar_sequence_segments"  # int64, one a token of prompt + response; OUTSIDE in rows not scored


def segment_batch(
    data: TensorDict, request: Request, token_bytes: TokenBytes, eos_ids: Collection[int]
) -> tuple[list[Tensor], Tensor]:
    """Segments and status of every row.

    `data` has the nested fields `responses`, `response_mask` and `oar_needed`; `eos_ids` end a response.

    Returns:
        int8 `[L_i]` segments for each row (OUTSIDE where a row is not to be scored), and int64 `[B]` of `Status`.
    """
    finder = make_finder(request.answer_patterns)
    segments, status = [], []
    rows = zip(data["responses"].unbind(), data["response_mask"].unbind(), data[NEEDED].unbind(), strict=True)
    for response, mask, needed in rows:
        found, state = np.full(len(response), Segment.OUTSIDE, dtype=np.int8), Status.NOT_NEEDED
        if bool(needed.any()):
            own = mask.cpu().numpy().astype(bool)
            longest = request.max_response_length, request.max_answer_tokens
            found, state = segment_response(response.tolist(), own, finder, token_bytes, eos_ids, *longest)
        segments.append(torch.from_numpy(found))
        status.append(int(state))
    return segments, torch.tensor(status)


def end_of_sequence_tokens(model_config: Any) -> set[int]:
    """Tokens that end a response: the tokenizer's, and those of the generation config (verl's `HFModelConfig`)."""
    tokens = {model_config.tokenizer.eos_token_id}
    generation = getattr(model_config.generation_config, "eos_token_id", None)
    tokens.update(generation if isinstance(generation, list) else [generation])
    return {token for token in tokens if token is not None}


def sequence_segments(segments: Sequence[Tensor], input_ids: Tensor) -> Tensor:
    """Extend segments of responses to whole sequences (prompt tokens are OUTSIDE), nested int64 like `input_ids`."""
    lengths = [len(row) for row in input_ids.unbind()]
    rows = [
        torch.nn.functional.pad(segment.long(), (length - len(segment), 0), value=int(Segment.OUTSIDE))
        for segment, length in zip(segments, lengths, strict=True)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
