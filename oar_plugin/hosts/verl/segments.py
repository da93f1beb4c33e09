"""Segments of the responses of a verl batch, whose fields are nested tensors."""

from collections.abc import Collection, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from oar_plugin.credit.answer import Segment
from oar_plugin.passes.request import NEEDED, Request
from oar_plugin.passes.segments import segment_rows
from oar_plugin.passes.tokens import TokenBytes

SEQUENCE_SEGMENTS = "oar_sequence_segments"  # int64, one per token of prompt and response; OUTSIDE in rows not scored


def segment_batch(
    data: TensorDict, request: Request, token_bytes: TokenBytes, eos_ids: Collection[int]
) -> tuple[list[Tensor], Tensor]:
    """Returns what `segment_rows` returns, for the nested fields `responses`, `response_mask` and `oar_needed` of `data`."""
    fields = (data[name].unbind() for name in ("responses", "response_mask", NEEDED))
    rows = (
        (ids.tolist(), own.cpu().numpy().astype(bool), bool(needed.any()))
        for ids, own, needed in zip(*fields, strict=True)
    )
    return segment_rows(rows, request, token_bytes, eos_ids)


def sequence_segments(segments: Sequence[Tensor], input_ids: Tensor) -> Tensor:
    """Returns the segments of whole sequences, nested int64 like `input_ids`; prompt tokens are OUTSIDE."""
    lengths = [len(row) for row in input_ids.unbind()]
    rows = [
        torch.nn.functional.pad(segment.long(), (length - len(segment), 0), value=int(Segment.OUTSIDE))
        for segment, length in zip(segments, lengths, strict=True)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
