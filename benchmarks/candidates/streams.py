"""One forward and one backward with everything on the way kept: what most candidates look at.

For HuggingFace decoders with `model.layers[i].self_attn.{q,k,v,o}_proj` (Llama, Qwen, Mistral).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oar_plugin.bench.fidelity_estimators import decoder_layers
from oar_plugin.bench.fidelity_responses import MicroBatch
from oar_plugin.credit.gradient import fisher_coefficients, joint_coefficients
from oar_plugin.credit.noise import position_seeds, signs
from oar_plugin.credit.probe import pool
from oar_plugin.hosts.taps import ModelTaps


@dataclass
class Layer:
    """What one attention saw: projections before rotation, and what its heads returned; gradients beside."""

    query: Tensor
    key: Tensor
    value: Tensor
    heads: Tensor
    d_query: Tensor
    d_key: Tensor
    d_value: Tensor
    d_heads: Tensor


@dataclass
class Streams:
    """Residual streams `[B, T, H]` in front of each layer (the first is the embeddings), and behind the last."""

    stream: list[Tensor]
    gradient: list[Tensor]
    layers: list[Layer]


def coefficients(batch: MicroBatch, logits_NV: Tensor, kind: str = "fisher", draw: int = 0) -> Tensor:
    """The scalar to differentiate: `fisher`, `likelihood` of the answer, or `margin` of the most likely token."""
    rows = batch.rows()
    if kind == "likelihood":
        return (joint_coefficients(logits_NV.detach(), rows) * logits_NV.float()).sum()
    pooled_BV = pool(logits_NV, rows)
    if kind == "fisher":
        seed_B = batch.scorer("fisher", 1).seed_B
        seed_B = seed_B if draw == 0 else position_seeds(seed_B, torch.zeros_like(seed_B), draw)
        return (fisher_coefficients(pooled_BV.detach(), signs(seed_B, 0, pooled_BV.shape[-1])) * pooled_BV).sum()
    p_BV = pooled_BV.detach().softmax(-1)
    if kind == "eigen":
        fisher_BVV = torch.diag_embed(p_BV) - p_BV[:, :, None] * p_BV[:, None]
        value_BV, vector_BVV = torch.linalg.eigh(fisher_BVV.double())
        c_BV = vector_BVV[:, :, -1 - draw] * value_BV[:, -1 - draw, None].clamp_min(0).sqrt()
        return (c_BV.float() * pooled_BV).sum()
    if kind == "top":
        at_B = p_BV.topk(draw + 1).indices[:, draw]
        c_BV = -p_BV
        c_BV = c_BV.scatter_add(-1, at_B[:, None], torch.ones(len(p_BV), 1))
        streams.p = p_BV.gather(-1, at_B[:, None])
        return (c_BV * pooled_BV).sum()
    top_B = p_BV.argmax(-1)
    rest_BV = p_BV.scatter(-1, top_B[:, None], 0.0)
    rest_BV = rest_BV / rest_BV.sum(-1, keepdim=True).clamp_min(1e-30)
    coefficient_BV = -rest_BV
    coefficient_BV.scatter_(-1, top_B[:, None], 1.0)
    return (coefficient_BV * pooled_BV).sum()


def streams(model: nn.Module, batch: MicroBatch, kind: str = "fisher", draw: int = 0) -> Streams:
    """Run it."""
    layers = decoder_layers(model)
    inputs: list[Tensor] = []
    projections: list[list[Tensor]] = [[] for _ in layers]
    handles = []

    def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True))
        attention: Any = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            handles.append(
                projection.register_forward_hook(lambda m, a, output, n=number: projections[n].append(output))
            )
        handles.append(attention.o_proj.register_forward_pre_hook(lambda m, a, n=number: projections[n].append(a[0])))
    handles.append(layers[-1].register_forward_hook(lambda m, a, o: inputs.append(o[0] if isinstance(o, tuple) else o)))
    try:
        with ModelTaps(model) as taps:
            taps.prepare(batch.rows().position_N, rows_only=True)
            model(input_ids=batch.token_BT, use_cache=False)
            assert taps.answer_logits is not None
            scalar = coefficients(batch, taps.answer_logits, kind, draw)
            wanted = [*inputs, *(x for found in projections for x in found)]
            gradients = [g.float() for g in torch.autograd.grad(scalar, wanted)]
    finally:
        for handle in handles:
            handle.remove()
    kept = [x.detach().float() for x in wanted]
    count = len(inputs)
    found = []
    for number in range(len(layers)):
        at = count + 4 * number
        found.append(Layer(*kept[at : at + 4], *gradients[at : at + 4]))
    return Streams(kept[:count], gradients[:count], found)


def split(x: Tensor, size: int) -> Tensor:
    """`[B, T, heads * D]` to `[B, heads, T, D]`."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def attention_weights(model: nn.Module, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys `[B, heads, T, D]` and scores before the softmax, `[B, heads, T, T]`, causal."""
    config: Any = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, key = split(layer.query, size), split(layer.key, size)
    query, key = rotated(model, query), rotated(model, key)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.transpose(-1, -2) / math.sqrt(size)
    length = logits.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return query, key, logits.masked_fill(future, -torch.inf)


def rotated(model: nn.Module, x: Tensor) -> Tensor:
    """Rotary position embeddings on `[B, heads, T, D]`."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    cos, sin = decoder.rotary_emb(x, torch.arange(x.shape[-2])[None])
    half = x.shape[-1] // 2
    return x * cos.float() + torch.cat([-x[..., half:], x[..., :half]], -1) * sin.float()


def centred(x: Tensor, batch: MicroBatch) -> Tensor:
    """`x [B, T, ...]` less its mean over the response's reasoning tokens."""
    keep = batch.reasoning_BT[..., None].float()
    return x - (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)
