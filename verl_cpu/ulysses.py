"""Stand-ins for flash-attention and for NCCL's all-to-all, with which verl's FSDP engine runs packed batches on a CPU.

verl's Ulysses wraps transformers' call of flash-attention's varlen kernel, and does nothing under another attention. The
wrapper stays; below it, with or without Ulysses, torch computes the attention of one packed sequence at a time:

* `varlen_attention`: flash-attention's kernel needs a GPU. It can go when transformers has a varlen kernel for the CPU.
* `all_to_all`, made of all-gathers, because gloo has none; it sends the bytes once per rank. It can go when gloo has one.

Call `install()` before an engine with `attn_implementation=ATTENTION` is built; nothing else calls it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ATTENTION = "oar_cpu_varlen"
"""Value of `override_config.attn_implementation` in verl's model config."""


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    *_: Any,
    position_ids: Tensor,
    **__: Any,
) -> Tensor:
    """Return causal attention within each sequence of a pack `[1, T, n, h]`; `position_ids` is zero where a sequence begins."""
    repeat = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)
    first = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    lengths = [end - start for start, end in zip(first, [*first[1:], query.shape[1]], strict=True)]
    parts = zip(*(x.transpose(1, 2).split(lengths, 2) for x in (query, key, value)), strict=True)
    attended = [nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
    return torch.cat(attended, 2).transpose(1, 2)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Implement transformers' interface: inputs are `[1, n, T, h]`, the output is `[1, T, n, h]`."""
    import transformers.integrations.flash_attention as flash  # verl wraps the function of this module

    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    position_ids = kwargs["position_ids"]
    out = flash._flash_attention_forward(
        query, key, value, attention_mask, query_length=query.shape[1], is_causal=True, position_ids=position_ids
    )
    return out, None


def _all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False) -> None:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    stacked = torch.stack([x.contiguous() for x in inputs])
    gathered = [torch.empty_like(stacked) for _ in range(size)]
    dist.all_gather(gathered, stacked, group=group)
    for j in range(size):
        outputs[j].copy_(gathered[j][rank])


def install() -> None:
    """Put both in place.

    Raises:
        RuntimeError: torch sees a GPU, which needs no stand-ins.
    """
    if torch.cuda.is_available():
        raise RuntimeError("torch sees a GPU, which needs no stand-ins")
    import verl.models.transformers.monkey_patch as monkey_patch
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)
    monkey_patch._flash_attention_forward = varlen_attention
    dist.all_to_all = _all_to_all  # type: ignore[assignment]
