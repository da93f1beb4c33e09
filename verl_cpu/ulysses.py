"""What stands in for flash-attention and for NCCL's all-to-all while verl's FSDP engine runs packed batches on a CPU.

verl's Ulysses wraps transformers' call of flash-attention's varlen kernel, and so does nothing under another attention.
The wrapper stays; under it, and without Ulysses too, attention is torch's own, one sequence of the pack after the other:

* `varlen_attention`: flash-attention's kernel needs a GPU. Until it, or transformers, has one for the CPU.
* `all_to_all` made of all-gathers: gloo has none, so it moves as many times the bytes as there are ranks. Until gloo has one.

`install()` is called by whoever builds an engine with `attn_implementation=ATTENTION`; nothing else is changed by it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ATTENTION = "oar_cpu_varlen"
"""For `override_config.attn_implementation` of verl's model config."""


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
    """Causal attention within each sequence of a pack `[1, T, n, h]`; a sequence begins where `position_ids` is zero."""
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
    """transformers' interface: heads before positions in what goes in, after them in what comes out."""
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
    """Put both in place, before an engine is built.

    Raises:
        RuntimeError: there is a GPU, for which these would stand in.
    """
    if torch.cuda.is_available():
        raise RuntimeError("these stand in for a GPU; there is one")
    import verl.models.transformers.monkey_patch as monkey_patch
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)
    monkey_patch._flash_attention_forward = varlen_attention
    dist.all_to_all = _all_to_all  # type: ignore[assignment]
