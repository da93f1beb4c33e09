"""Attention patching: what a token's *replacement* by PAD does to every attention layer, with the softmax taken again.

One forward with one more token a response and one backward, as a gradient takes. But it reads queries, keys, values and the
gradient at the heads' outputs of every layer, which no engine provides. Not in the paper. Written for the study's own models.
"""

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.fidelity.responses import MicroBatch
from benchmarks.tiny.words import PAD
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.probe import answer_rows, pool


def attention_patching(model: nn.Module, batch: MicroBatch, directions: int = 1) -> Tensor:
    """Attention patching towards PAD: the softmax taken again with a PAD's key, along the answer's leading directions.

    The score is `|effect| * sqrt(bound)` of `replaced_key_effect`, both summed over heads and layers, a backward for each
    direction. The effect is what exact OAR-P measures, to first order behind each head; where contributions cancel by
    accident, or move the answer in a direction that no backward sees, the bound keeps the token from zero.
    """
    llama: Any = model
    token_BS, position_BS, seen_BSS = with_pad(batch)
    projected: tuple[list[Tensor], ...] = ([], [], [])
    heads: list[Tensor] = []
    with ExitStack() as hooks:
        for layer in llama.model.layers:
            attention = layer.self_attn
            for kept, part in zip(projected, (attention.q_proj, attention.k_proj, attention.v_proj), strict=True):
                handle = part.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
                hooks.callback(handle.remove)
            hooks.callback(attention.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0])).remove)
        embedding_BSH = llama.get_input_embeddings()(token_BS).detach().requires_grad_()
        inputs = {"inputs_embeds": embedding_BSH, "position_ids": position_BS, "attention_mask": seen_BSS[:, None]}
        logits_BSV = llama(**inputs, use_cache=False).logits
    scalars = answer_scalars(logits_BSV, batch, directions)
    gradients = [torch.autograd.grad(scalar, heads, retain_graph=True) for scalar in scalars]

    size = llama.config.head_dim
    place_1T = torch.arange(batch.token_BT.shape[1], device=token_BS.device)[None]
    rotation = llama.model.rotary_emb(embedding_BSH.float(), place_1T)
    effect_KBT, bound_KBT = torch.zeros(2, directions, *batch.token_BT.shape, device=token_BS.device)
    for number, layer in enumerate(zip(*projected, strict=True)):
        q, k, v = (_split(x.detach().float(), size) for x in layer)
        # The last position is the PAD: its key, rotated to each place, and its value stand in for every token's.
        pad_k, pad_v = (x[:, :, -1:].expand_as(x[:, :, 1:]) for x in (k, v))
        q, k, v = (x[:, :, :-1] for x in (q, k, v))
        _, pad_k = apply_rotary_pos_emb(q, pad_k, *rotation)
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        for direction, gradient in enumerate(gradients):
            g = _split(gradient[number][:, :-1].float(), size)
            effect_BhT, bound_BhT = replaced_key_effect(q * size**-0.5, k, v, g, pad_k, pad_v)
            effect_KBT[direction] += effect_BhT.sum(1)
            bound_KBT[direction] += bound_BhT.sum(1)
    return effect_KBT.square().sum(0).sqrt() * bound_KBT.sum(0).sqrt()


def with_pad(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and who sees whom, with a PAD behind each row that reads as if it stood amid the reasoning.

    It sees what stands before that position and itself, and nobody sees it.
    """
    rows, length = batch.token_BT.shape
    place_S = torch.arange(length + 1, device=batch.token_BT.device)
    middle_B1 = place_S.new_tensor([[row.reasoning_R[len(row.reasoning_R) // 2]] for row in batch.responses])
    position_BS = torch.cat([place_S[:-1].expand(rows, -1), middle_B1], 1)
    earlier_BSS = (position_BS[:, None] < position_BS[:, :, None]) & (place_S < length)
    token_BS = torch.nn.functional.pad(batch.token_BT, (0, 1), value=PAD)
    return token_BS, position_BS, earlier_BSS | (place_S == place_S[:, None])


def answer_scalars(logits_BSV: Tensor, batch: MicroBatch, directions: int) -> Tensor:
    """The answer's logits along the leading eigenvectors of their softmax's Fisher matrix, each times the root of its
    eigenvalue, `[directions]`: of all directions those in which the logits move the distribution most."""
    rows, length = batch.token_BT.shape
    answer_T = (batch.segments_BT == Segment.ANSWER).flatten()
    response_T = torch.arange(rows, device=answer_T.device).repeat_interleave(length)
    read = answer_rows(answer_T, response_T, batch.token_BT.flatten(), rows, batch.probe)
    pooled_BV = pool(logits_BSV[:, :-1].flatten(0, 1)[read.position_N], read)
    p_BV = pooled_BV.detach().double().softmax(-1)
    value_BV, vector_BVV = torch.linalg.eigh(torch.diag_embed(p_BV) - p_BV[:, :, None] * p_BV[:, None])
    root_BVV = (vector_BVV * value_BV[:, None].clamp_min(0).sqrt()).to(pooled_BV.dtype)
    return torch.einsum("bvk,bv->k", root_BVV[:, :, -directions:], pooled_BV)


def _split(x_BTE: Tensor, size: int) -> Tensor:
    """`[B, T, heads * D]` to `[B, heads, T, D]`."""
    return x_BTE.unflatten(-1, (-1, size)).transpose(1, 2)


def replaced_key_effect(
    query_TD: Tensor,
    key_TD: Tensor,
    value_TD: Tensor,
    gradient_TD: Tensor,
    other_key_TD: Tensor,
    other_value_TD: Tensor,
) -> tuple[Tensor, Tensor]:
    """What one attention layer does to the probe when a position's key and value are replaced by others.

    A gradient takes attention for linear, and where a softmax is saturated it is not (AtP*, arXiv 2403.00745). Here the
    softmax of every later query `i` is taken again, exactly, with the one logit replaced, which changes the head's output by
    `d_it`; only what follows the output is linear.

    Args, each `[..., T, D]`: queries (scaled) and keys, rotated, and values; the gradient `g_i` of the scalar at the head's
    outputs, before their projection; then what stands in for each key and value.

    Returns:
        Two `[..., T]`, sums over later queries: `<g_i, d_it>`, the signed effect, in which contributions may cancel, and its
        bound `||g_i||^2 ||d_it||^2`, in which nothing cancels.
    """
    place_T = torch.arange(key_TD.shape[-2], device=key_TD.device)
    logit_QT = (query_TD @ key_TD.mT).masked_fill(place_T > place_T[:, None], -math.inf)
    share_QT = logit_QT.softmax(-1)
    output_Q1D = (share_QT @ value_TD)[..., None, :]
    # The head's output without key t, and the sum of exponentials that it takes: from what is there less the share of t.
    share_QT1 = share_QT[..., None]
    without_QTD = (output_Q1D - share_QT1 * value_TD[..., None, :, :]) / (1 - share_QT1)
    sum_QT = logit_QT.logsumexp(-1, keepdim=True) + torch.log1p(-share_QT)
    # The key that a query looks at most may have all of the share; then nothing is left to subtract from, and the softmax of
    # the rest is taken itself. Every other key has at most half.
    top_QT = torch.zeros_like(logit_QT, dtype=torch.bool).scatter(-1, logit_QT.argmax(-1, keepdim=True), True)
    rest_QT = logit_QT.masked_fill(top_QT, -math.inf)
    without_QTD = torch.where(top_QT[..., None], (rest_QT.softmax(-1) @ value_TD)[..., None, :], without_QTD)
    sum_QT = torch.where(top_QT, rest_QT.logsumexp(-1, keepdim=True), sum_QT)

    other_QT1 = (query_TD @ other_key_TD.mT - sum_QT).sigmoid()[..., None]
    change_QTD = torch.lerp(without_QTD, other_value_TD[..., None, :, :], other_QT1) - output_Q1D
    # A query on its own position is the token's own business: what it becomes is in the keys of the next layer.
    not_later_QT = place_T >= place_T[:, None]
    effect_QT = (change_QTD @ gradient_TD[..., None])[..., 0].masked_fill(not_later_QT, 0.0)
    length_QT = change_QTD.square_().sum(-1).masked_fill(not_later_QT, 0.0)
    return effect_QT.sum(-2), (gradient_TD.square().sum(-1, keepdim=True) * length_QT).sum(-2)
