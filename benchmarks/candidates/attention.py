"""Candidates around attention: parts and relatives of `attention`, which is in the package."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parent))

from streams import Direction, scalar, square, streams

from oar_plugin.bench.fidelity_attention import attention_effects, leading_direction
from oar_plugin.bench.fidelity_responses import MicroBatch
from oar_plugin.credit.gradient import patching_importance
from oar_plugin.credit.probe import AnswerRows, pool


def effect_only(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The signed effect of `attention` alone, squared: AtP* towards PAD with its correction of queries and keys; 1 + 1."""
    return attention_effects(model, batch, leading_direction)[0].square()


def bound_only(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The bound of `attention` alone; 1 + 1."""
    return attention_effects(model, batch, leading_direction)[1]


def of_direction(model: nn.Module, batch: MicroBatch, direction: Direction) -> Tensor:
    """`attention` along another direction: one random sign vector, or the answer's log-likelihood; 1 + 1."""
    return patching_importance(*attention_effects(model, batch, lambda z, rows: scalar(batch, rows, z, direction)))


def several_directions(model: nn.Module, batch: MicroBatch, count: int) -> Tensor:
    """`attention` along the leading eigenvectors of the softmax's Fisher matrix; 1 + as many."""
    effect, bound = torch.zeros(2, *batch.token_BT.shape)
    for number in range(count):

        def along(logits_NV: Tensor, rows: AnswerRows, number: int = number) -> Tensor:
            pooled_BV = pool(logits_NV, rows)
            p_BV = pooled_BV.detach().double().softmax(-1)
            value_BV, vector_BVV = torch.linalg.eigh(torch.diag_embed(p_BV) - p_BV[:, :, None] * p_BV[:, None])
            scale_B1 = value_BV[:, -1 - number, None].clamp_min(0).sqrt()
            return ((vector_BVV[:, :, -1 - number] * scale_B1).float() * pooled_BV).sum()

        # Every direction has a forward of its own here; an engine would need one for all.
        one_effect, one_bound = attention_effects(model, batch, along)
        effect += one_effect.square()
        bound += one_bound
    return patching_importance(effect.sqrt(), bound)


def _weights(model: nn.Module, query: Tensor, key: Tensor) -> Tensor:
    """Attention `[B, heads, T, T]` from projections before rotation."""
    config: Any = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary: Any = model.get_decoder().rotary_emb  # type: ignore[operator]
    length = query.shape[1]
    cos, sin = rotary(query, torch.arange(length)[None])

    def turned(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, size)).transpose(1, 2)
        half = size // 2
        return x * cos.float() + torch.cat([-x[..., half:], x[..., :half]], -1) * sin.float()

    q, k = turned(query), turned(key)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return ((q @ k.mT) * size**-0.5).masked_fill(future, -torch.inf).softmax(-1)


def attention_times_gradient(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Sum over layers, heads and later queries of a_it^2 ||g_i||^2, g at the heads' outputs; 1 + 1."""
    total = torch.zeros(batch.token_BT.shape)
    for layer in streams(model, batch).layers:
        a_BKTT = _weights(model, layer.query, layer.key)
        size = layer.query.shape[-1] // a_BKTT.shape[1]
        g_BKT = square(layer.d_output.unflatten(-1, (-1, size))).transpose(1, 2)
        total += (g_BKT[..., None] * a_BKTT.square()).sum((1, 2))
    return total


def rollout(model: nn.Module, batch: MicroBatch, gradient: bool = True) -> Tensor:
    """Attention rollout from the answer's rows, times the Fisher norm at the embeddings; 1 + 1."""
    run = streams(model, batch)
    rows, length = batch.token_BT.shape
    flow = torch.eye(length).expand(rows, -1, -1)
    for layer in run.layers:
        flow = (0.5 * torch.eye(length) + 0.5 * _weights(model, layer.query, layer.key).mean(1)) @ flow
    answer = batch.rows()
    reached = torch.zeros(rows, length)
    reached.index_add_(0, answer.response_N, flow.flatten(0, 1)[answer.position_N])
    return reached.square() * square(run.gradient[0]) if gradient else reached


@torch.no_grad()
def read_again(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Exact OAR-P's direct part: only what follows the reasoning is run again, with a PAD's keys and values; no backward."""
    scores = torch.zeros(batch.token_BT.shape, dtype=torch.float64)
    dtype = next(model.parameters()).dtype
    for row, response in enumerate(batch.responses):
        start, end = response.answer
        reasoning = response.reasoning_R
        count, begin = len(reasoning), int(reasoning[-1]) + 1
        cache = DynamicCache()
        logits = model(input_ids=response.token_T[None, : end - 1], past_key_values=cache, use_cache=True).logits[0]
        reference = logits[start - 1 :].float().mean(0).double().log_softmax(-1)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[..., :begin, :], layer.values[..., :begin, :]
        seen = torch.arange(begin)[None] < reasoning[:, None]
        mask = torch.cat([seen, torch.eye(count, dtype=torch.bool)], 1)
        pads = torch.full((1, count), batch.replacement_token)
        _extend(model, pads, reasoning[None], cache, mask, dtype)  # a PAD at every position, each alone with its prefix

        rows, last = end - 1 - begin, begin + count
        mask = torch.zeros(count, rows, last + count * rows, dtype=torch.bool)
        mask[:, :, :begin] = torch.arange(begin)[None, None] != reasoning[:, None, None]
        mask[:, :, begin:last] = torch.eye(count, dtype=torch.bool)[:, None]
        own = torch.ones(rows, rows, dtype=torch.bool).tril()
        for number in range(count):
            mask[number, :, last + number * rows : last + (number + 1) * rows] = own
        again = _extend(
            model,
            response.token_T[begin : end - 1].repeat(count)[None],
            torch.arange(begin, end - 1).repeat(count)[None],
            cache,
            mask.flatten(0, 1),
            dtype,
        )
        outcome = again.view(count, rows, -1)[:, start - 1 - begin :].float().mean(1).double().log_softmax(-1)
        scores[row, reasoning] = (reference.exp() * (reference - outcome)).sum(-1)
    return scores


def _extend(
    model: nn.Module, token_1S: Tensor, position_1S: Tensor, cache: DynamicCache, mask_SL: Tensor, dtype: torch.dtype
) -> Tensor:
    additive = torch.zeros(mask_SL.shape, dtype=dtype).masked_fill_(~mask_SL, torch.finfo(dtype).min)
    logits: Tensor = model(
        input_ids=token_1S,
        position_ids=position_1S,
        past_key_values=cache,
        use_cache=True,
        attention_mask=additive[None, None],
    ).logits
    return logits[0]


ESTIMATORS = {
    "attention effect": effect_only,
    "attention bound": bound_only,
    "attention sign": partial(of_direction, direction="sign"),
    "attention ll": partial(of_direction, direction="likelihood"),
    "attention x2": partial(several_directions, count=2),
    "attention x3": partial(several_directions, count=3),
    "attention x gradient": attention_times_gradient,
    "rollout x gradient": rollout,
    "read again": read_again,
}
