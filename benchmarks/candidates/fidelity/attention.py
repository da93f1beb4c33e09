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

from benchmarks.fidelity.attention import attention_effects, leading_direction, recorded_heads
from benchmarks.fidelity.patching import patching_importance
from benchmarks.fidelity.responses import MicroBatch
from benchmarks.fidelity.scores import TOP, order
from oar_plugin.credit.probe import AnswerRows, pool


def effect_only(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The signed effect of `attention` alone, squared: AtP* towards PAD with its correction of queries and keys; 1 + 1."""
    return attention_effects(model, batch, leading_direction)[0][0].square()


def bound_only(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The bound of `attention` alone; 1 + 1."""
    return attention_effects(model, batch, leading_direction)[1][0]


def of_direction(model: nn.Module, batch: MicroBatch, direction: Direction) -> Tensor:
    """`attention` along another direction: one random sign vector, or the answer's log-likelihood; 1 + 1."""
    found = attention_effects(model, batch, lambda logits, rows: scalar(batch, rows, logits, direction)[None])
    return patching_importance(*(x[0] for x in found))


def several_directions(model: nn.Module, batch: MicroBatch, count: int) -> Tensor:
    """`attention` along the leading eigenvectors of the softmax's Fisher matrix; 1 + as many."""
    effect_KBT, bound_KBT = attention_effects(model, batch, lambda logits, rows: _leading(logits, rows, count))
    return patching_importance(effect_KBT.square().sum(0).sqrt(), bound_KBT.sum(0))


@torch.no_grad()
def borderline(model: nn.Module, batch: MicroBatch, copies: int, count: int) -> Tensor:
    """`attention`, then exact copies of the tokens around the border of the top 20 %, on the keys and values already there.

    What is surely in, or surely out, needs no exact score. 1 + 1 a direction, and about 0.4 passes a copy: cheap for short
    responses only, since the number of copies that it takes grows with them.
    """
    outcome: list[Tensor] = []

    def remember(logits_NV: Tensor, rows: AnswerRows) -> Tensor:
        outcome.append(pool(logits_NV.detach(), rows).double().log_softmax(-1))
        return _leading(logits_NV, rows, count)

    with torch.enable_grad(), recorded_heads(model) as heads:
        effect_KBT, bound_KBT = attention_effects(model, batch, remember)
    score_BT = patching_importance(effect_KBT.square().sum(0).sqrt(), bound_KBT.sum(0)).double()
    keys = [_turned(model, key.detach()) for key in heads.key]
    values = [_heads(model, value.detach()) for value in heads.value]
    for row, response in enumerate(batch.responses):
        reasoning_R, (start, end) = response.reasoning_R, response.answer
        ranked_R = order(score_BT[row, reasoning_R])
        begin = max(0, max(1, round(TOP * len(ranked_R))) - copies // 2)
        window = reasoning_R[ranked_R[begin : begin + copies]]
        exact = []
        for at in window.tolist():
            cache = DynamicCache()
            for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
                cache.update(key[row : row + 1, :, :at], value[row : row + 1, :, :at], layer)
            token_1S = response.token_T[None, at : end - 1].clone()
            token_1S[0, 0] = batch.replacement_token
            position_1S = torch.arange(at, end - 1)[None]
            logits = model(input_ids=token_1S, position_ids=position_1S, past_key_values=cache, use_cache=True).logits[
                0
            ]
            found_V = logits[start - end :].float().mean(0).double().log_softmax(-1)
            exact.append(float((outcome[0][row].exp() * (outcome[0][row] - found_V)).sum()))
        # Their order changes, among the values that were there: neighbours in rank stay neighbours.
        score_BT[row, window[order(torch.tensor(exact))]] = score_BT[row, window].clone()
    return score_BT


def _leading(logits_NV: Tensor, rows: AnswerRows, count: int) -> Tensor:
    """The scalars of the `count` leading eigenvectors of each response's Fisher matrix, `[count]`."""
    pooled_BV = pool(logits_NV, rows)
    p_BV = pooled_BV.detach().double().softmax(-1)
    value_BV, vector_BVV = torch.linalg.eigh(torch.diag_embed(p_BV) - p_BV[:, :, None] * p_BV[:, None])
    root_BVV = (vector_BVV * value_BV[:, None].clamp_min(0).sqrt()).float()
    return torch.einsum("bvk,bv->k", root_BVV[:, :, -count:], pooled_BV)


def _heads(model: nn.Module, x_BTE: Tensor) -> Tensor:
    """`[B, heads, T, D]`."""
    config: Any = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return x_BTE.unflatten(-1, (-1, size)).transpose(1, 2)


def _turned(model: nn.Module, x_BTE: Tensor) -> Tensor:
    """The same with rotary positions."""
    x_BKTD = _heads(model, x_BTE)
    rotary: Any = model.get_decoder().rotary_emb  # type: ignore[operator]
    cos, sin = rotary(x_BKTD, torch.arange(x_BKTD.shape[2])[None])
    half = x_BKTD.shape[-1] // 2
    return x_BKTD * cos + torch.cat([-x_BKTD[..., half:], x_BKTD[..., :half]], -1) * sin


def _weights(model: nn.Module, query: Tensor, key: Tensor) -> Tensor:
    """Attention `[B, heads, T, T]` from projections before rotation."""
    q, k = _turned(model, query), _turned(model, key)
    size, length = q.shape[-1], q.shape[-2]
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
    "border 6": partial(borderline, copies=6, count=1),
    "border 4 x2": partial(borderline, copies=4, count=2),
    "attention x gradient": attention_times_gradient,
    "rollout x gradient": rollout,
    "read again": read_again,
}
