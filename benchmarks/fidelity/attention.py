"""Attention patching on a HuggingFace model: what its layers saw, and a PAD's keys and values.

For decoders with `self_attn.{q,k,v,o}_proj`, rotary positions from `rotary_emb` and no normalization of queries and keys
(Llama, Qwen2, Mistral). One forward with one more token a response, one backward to the heads' outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.patching import patching_importance, principal_coefficients, replaced_key_effect
from benchmarks.fidelity.responses import MicroBatch
from oar_plugin.credit.probe import AnswerRows, pool
from oar_plugin.passes.tap import Tap
from oar_plugin.passes.taps import ModelTaps, unwrapped


@dataclass
class Heads:
    """Of each layer: projections before rotation, and the heads' outputs with a graph; `[B, T, heads * D]`."""

    query: list[Tensor] = field(default_factory=list)
    key: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)


@contextmanager
def recorded_heads(model: nn.Module) -> Iterator[Heads]:
    """Keep what the next forward's attention layers compute.

    Raises:
        ValueError: the layers are built in another way.
    """
    found = Heads()
    handles = []
    decoder: Any = unwrapped(model).get_decoder()  # type: ignore[operator]
    try:
        for layer in decoder.layers:
            attention: Any = getattr(layer, "self_attn", None)
            missing = [name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if not hasattr(attention, name)]
            if missing or hasattr(attention, "q_norm"):
                raise ValueError(f"attention patching: {type(layer).__name__} has no plain self_attn.{{q,k,v,o}}_proj")
            for name, kept in (("q_proj", found.query), ("k_proj", found.key), ("v_proj", found.value)):
                handles.append(getattr(attention, name).register_forward_hook(_keeps(kept)))
            handles.append(attention.o_proj.register_forward_pre_hook(_keeps_input(found.output)))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keeps(kept: list[Tensor]) -> Any:
    return lambda module, args, output: kept.append(output)


def _keeps_input(kept: list[Tensor]) -> Any:
    return lambda module, args: kept.append(args[0])


def logits_with_graph(
    model: nn.Module, row_N: Tensor, noise: Callable[[Tensor], Tensor] | None = None, **inputs: Tensor
) -> Tensor:
    """Logits of some rows of a forward, `[N, V]`, with a graph down to the embeddings and without the weights.

    Args:
        model: causal LM.
        row_N: see `Tap`.
        noise: see `Tap`.
        inputs: of the model.
    """
    kept: list[Tensor] = []
    with ModelTaps(model) as taps:
        taps.tap = Tap(
            row_N, lambda project, hidden_NH: kept.append(project(hidden_NH)), receive=lambda *_: None, noise=noise
        )
        model(**inputs, use_cache=False)
    return kept[0]


def attention_patching(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Attention patching towards PAD: the softmax taken again with a PAD's key, along the answer's leading direction."""
    effect_KBT, bound_KBT = attention_effects(model, batch, leading_direction)
    return patching_importance(effect_KBT[0], bound_KBT[0])


def leading_direction(logits_NV: Tensor, rows: AnswerRows) -> Tensor:
    """The scalar to differentiate, `[1]`."""
    pooled_BV = pool(logits_NV, rows)
    return (principal_coefficients(pooled_BV.detach()) * pooled_BV).sum()[None]


def attention_effects(
    model: nn.Module, batch: MicroBatch, scalars: Callable[[Tensor, AnswerRows], Tensor]
) -> tuple[Tensor, Tensor]:
    """Effect and bound of replacing each token by PAD, `[K, B, T]` each, summed over layers; see `replaced_key_effect`.

    Args:
        model: causal LM.
        batch: what is scored.
        scalars: K of them, `[K]`, from the answer's logits `[N, V]` and their rows; a backward each.
    """
    rows, length = batch.token_BT.shape
    token_BS, position_BS, mask_BSS = _with_pad(batch, next(model.parameters()).dtype)
    answer = batch.rows()
    row_N = answer.position_N // length * (length + 1) + answer.position_N % length
    with recorded_heads(model) as heads:
        logits_NV = logits_with_graph(
            model, row_N, input_ids=token_BS, position_ids=position_BS, attention_mask=mask_BSS[:, None]
        )
        scalar_K = scalars(logits_NV, answer)
        gradients = [torch.autograd.grad(scalar, heads.output, retain_graph=True) for scalar in scalar_K]

    config: Any = unwrapped(model).config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary: Any = unwrapped(model).get_decoder().rotary_emb  # type: ignore[operator]
    cos_TD, sin_TD = (
        x[0].float() for x in rotary(token_BS.float(), torch.arange(length, device=token_BS.device)[None])
    )
    effect_KBT, bound_KBT = torch.zeros(2, len(gradients), rows, length, device=token_BS.device)
    for number, layer in enumerate(zip(heads.query, heads.key, heads.value, strict=True)):
        q, k, v = (_split(x.detach().float(), size) for x in layer)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        # The last position is the PAD: its key, rotated to each place, and its value stand in for every token's.
        key, value = (x[:, :, -1:].expand(-1, -1, length, -1) for x in (k, v))
        q, k, key = (_rotated(x, cos_TD, sin_TD) for x in (q[:, :, :-1], k[:, :, :-1], key))
        for place, gradient in enumerate(gradients):
            g = _split(gradient[number][:, :-1].float(), size)
            parts = [x.flatten(0, 1) for x in (q * size**-0.5, k, v[:, :, :-1], g, key, value)]
            effect_NT, bound_NT = replaced_key_effect(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5])
            effect_KBT[place] += effect_NT.unflatten(0, (rows, -1)).sum(1)
            bound_KBT[place] += bound_NT.unflatten(0, (rows, -1)).sum(1)
    return effect_KBT, bound_KBT


def _with_pad(batch: MicroBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and additive mask with a PAD behind each row that reads as if it stood amid the reasoning.

    It sees what stands before that position and itself, and nobody sees it.
    """
    rows, length = batch.token_BT.shape
    device = batch.token_BT.device
    middle_B = torch.tensor([int(r.reasoning_R[len(r.reasoning_R) // 2]) for r in batch.responses], device=device)
    token_BS = torch.nn.functional.pad(batch.token_BT, (0, 1), value=batch.replacement_token)
    position_BS = torch.cat([torch.arange(length, device=device).expand(rows, -1), middle_B[:, None]], 1)
    seen_BSS = torch.ones(length + 1, length + 1, dtype=torch.bool, device=device).tril().repeat(rows, 1, 1)
    seen_BSS[:, -1] = torch.arange(length + 1, device=device) < middle_B[:, None]
    seen_BSS[:, -1, -1] = True
    mask_BSS = torch.zeros(seen_BSS.shape, dtype=dtype, device=device).masked_fill_(~seen_BSS, torch.finfo(dtype).min)
    return token_BS, position_BS, mask_BSS


def _split(x_BTE: Tensor, size: int) -> Tensor:
    """`[B, T, heads * D]` to `[B, heads, T, D]`."""
    return x_BTE.unflatten(-1, (-1, size)).transpose(1, 2)


def _rotated(x_BKTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    half = x_BKTD.shape[-1] // 2
    return x_BKTD * cos_TD + torch.cat([-x_BKTD[..., half:], x_BKTD[..., :half]], -1) * sin_TD
