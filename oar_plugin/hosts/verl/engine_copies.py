"""Masked copies in verl's training engines: every data-parallel rank scores its own rows, in step with the others."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import DynamicCache
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name

from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.masked_copies import MaskedCopies
from oar_plugin.passes.request import Request


def engine_copies(
    engine: Any,
    data: TensorDict,
    request: Request,
    segments: Sequence[Tensor],
    status_B: Tensor,
    gradient: Sequence[Tensor],
) -> list[Tensor]:
    """Importance of each row from masked copies, float32 `[L_i]`; zeros where `status_B` is not SCORED.

    Args:
        engine: one of verl's FSDP engines with our mixin, in eval mode.
        data: the batch, as `infer_batch` got it.
        gradient: gradient scores `[L_i]`, which choose the units of a budget where the importance says so.
    """
    tokens = _tokens_of_a_forward(engine, data)
    copies = (
        _SequenceParallelCopies(engine, data, request, tokens)
        if engine.use_ulysses_sp
        else MaskedCopies(engine.module, request, tokens)
    )
    input_ids = data["input_ids"].unbind()
    rows = (status_B == Status.SCORED).nonzero()[:, 0].tolist()
    wanted = {row: (input_ids[row].to(get_device_id()), segments[row], gradient[row]) for row in rows}
    with _autocast(engine):
        found = copies.importance(wanted, engine.largest_count)
    return [found.get(row, torch.zeros(len(segment))) for row, segment in enumerate(segments)]


def _tokens_of_a_forward(engine: Any, data: TensorDict) -> int:
    """The token budget of verl's log-prob pass."""
    if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        return int(data["max_token_len_per_gpu"] * engine.ulysses_sequence_parallel_size)
    return int(data["micro_batch_size_per_gpu"]) * int(data["input_ids"].offsets().diff().max())


def _autocast(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """What verl's `forward_step` runs the model in."""
    dtype = getattr(engine, "_autocast_dtype", torch.bfloat16)
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device_type=get_device_name(), dtype=dtype)


class _SequenceParallelCopies(MaskedCopies):
    """Whole copies through verl's own forward, which cuts the sequences up among the ranks of a Ulysses group.

    A prefix cannot be shared: verl's attention exchanges heads for positions over the whole pack.
    """

    def __init__(self, engine: Any, data: TensorDict, *arguments: Any) -> None:
        super().__init__(engine.module, *arguments)
        self._shares_prefix = False
        self.engine = engine
        # verl's fields and flags around the tokens: those of any row will do, for a forward that projects rows only.
        self.template = tu.index_select_tensor_dict(data, torch.tensor([0]))

    def _forward(self, token_KT: Tensor, row_N: Tensor, cache: DynamicCache | None) -> Tensor:
        self.tokens += token_KT.numel()
        copies, length = token_KT.shape
        micro_batch = tu.index_select_tensor_dict(self.template, torch.zeros(copies, dtype=torch.long))
        offsets = torch.arange(copies + 1, device=token_KT.device) * length
        position_T = torch.arange(length, device=token_KT.device).repeat(copies)
        for name, values_T in (("input_ids", token_KT.flatten()), ("position_ids", position_T)):
            micro_batch[name] = torch.nested.nested_tensor_from_jagged(values_T, offsets)
        return self.engine.answer_logits_of(micro_batch, row_N.to(token_KT.device))
