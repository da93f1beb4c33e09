"""The forward of a small Llama in a third of the calls that its own takes, on the same parameters.

At this size calls cost more than arithmetic. Equal to the model's own forward up to rounding.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


def rows_of(model: PreTrainedModel, embedding_BLH: Tensor) -> Tensor:
    """What `head_of` projects to logits, `[B, L, H]`, for sequences that are padded behind their end.

    Args:
        model: from `benchmarks.tiny.model.build_model`.
        embedding_BLH: the input embeddings, with a graph or without.
    """
    base: Any = model.model
    heads = model.config.num_attention_heads
    batch, length, hidden = embedding_BLH.shape
    cos, sin = base.rotary_emb(embedding_BLH, torch.arange(length)[None])
    half = cos.shape[-1] // 2
    # Rotation as in `benchmarks.tiny.model`: x * cos + roll(x) * sin, with the sign of rotate_half in the sine.
    cos_LD, sin_LD = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    x = embedding_BLH
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        q, k, v = _normed(layer.input_layernorm, x, qkv).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (part * cos_LD + part.roll(half, -1) * sin_LD for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, hidden), attention.o_proj.weight)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        gate, up = _normed(layer.post_attention_layernorm, x, gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, mlp.down_proj.weight)
    return F.rms_norm(x, (hidden,), None, base.norm.variance_epsilon)


def head_of(model: PreTrainedModel) -> Tensor:
    """The projection to the vocabulary, the last norm's weight in it, `[V, H]`."""
    parts: Any = model
    return parts.lm_head.weight * parts.model.norm.weight


def _normed(norm: Any, x: Tensor, weight: Tensor) -> Tensor:
    """`weight @ norm(x)`: the norm's own weight costs nothing where it is part of the next one."""
    return F.linear(F.rms_norm(x, (x.shape[-1],), None, norm.variance_epsilon), weight * norm.weight)


def micro_batches(length_B: Tensor, rows: int = 32) -> Iterator[tuple[Tensor, int]]:
    """Indices of rows of like length, and the longest of them: what fits a core's cache is done in less time."""
    for chosen in length_B.argsort().split(rows):
        yield chosen, int(length_B[chosen].max())
