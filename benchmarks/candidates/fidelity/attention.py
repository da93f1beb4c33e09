"""Candidates that were better than `attention`, and the best of those that read the gradient at the embeddings alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from benchmarks.fidelity.attention import attention_effects, patching_importance
from benchmarks.fidelity.estimators import by_importance
from benchmarks.fidelity.responses import MicroBatch
from benchmarks.fidelity.scores import order, top
from oar_plugin.credit.probe import AnswerRows, pool


def several_directions(model: nn.Module, batch: MicroBatch, count: int) -> Tensor:
    """`attention` along the leading eigenvectors of the softmax's Fisher matrix; 1 + as many."""
    effect_KBT, bound_KBT, _ = attention_effects(model, batch, partial(_leading, count=count))
    return patching_importance(effect_KBT, bound_KBT)


def _leading(logits_NV: Tensor, rows: AnswerRows, count: int) -> Tensor:
    """The scalars of the `count` leading eigenvectors of each response's Fisher matrix, `[count]`."""
    pooled_BV = pool(logits_NV, rows)
    p_BV = pooled_BV.detach().double().softmax(-1)
    value_BV, vector_BVV = torch.linalg.eigh(torch.diag_embed(p_BV) - p_BV[:, :, None] * p_BV[:, None])
    root_BVV = (vector_BVV * value_BV[:, None].clamp_min(0).sqrt()).float()
    return torch.einsum("bvk,bv->k", root_BVV[:, :, -count:], pooled_BV)


def borderline(model: nn.Module, batch: MicroBatch, copies: int, count: int) -> Tensor:
    """`attention`, then exact copies of the tokens around the border of the top 20 %, on the keys and values already there.

    What is surely in, or surely out, needs no exact score. 1 + 1 a direction, and about 0.4 passes a copy: cheap for short
    responses only, since the number of copies that it takes grows with them.
    """
    outcome: list[Tensor] = []

    def remember(logits_NV: Tensor, rows: AnswerRows) -> Tensor:
        outcome.append(pool(logits_NV.detach(), rows).double().log_softmax(-1))
        return _leading(logits_NV, rows, count)

    effect_KBT, bound_KBT, layers = attention_effects(model, batch, remember)
    score_BT = patching_importance(effect_KBT, bound_KBT).double()
    dtype, device = next(model.parameters()).dtype, batch.token_BT.device
    for row, response in enumerate(batch.responses):
        reasoning_R, (start, end) = response.reasoning_R.to(device), response.answer
        ranked_R = order(score_BT[row, reasoning_R])
        begin = max(0, len(top(ranked_R)) - copies // 2)
        window = reasoning_R[ranked_R[begin : begin + copies]]
        exact = []
        for at in window.tolist():
            cache = DynamicCache()
            for number, layer in enumerate(layers):
                cache.update(*(x[row : row + 1, :, :at].to(dtype) for x in layer), number)
            token_1S = batch.token_BT[row : row + 1, at : end - 1].clone()
            token_1S[0, 0] = batch.replacement_token
            inputs: dict[str, Any] = {
                "input_ids": token_1S,
                "position_ids": torch.arange(at, end - 1, device=device)[None],
            }
            with torch.no_grad():
                logits_SV = model(**inputs, past_key_values=cache, use_cache=True).logits[0]
            found_V = logits_SV[start - end :].float().mean(0).double().log_softmax(-1)
            exact.append(float((outcome[0][row].exp() * (outcome[0][row] - found_V)).sum()))
        # Their order changes, among the values that were there: neighbours in rank stay neighbours.
        score_BT[row, window[order(torch.tensor(exact)).to(device)]] = score_BT[row, window].clone()
    return score_BT


def norm_times_pad(model: nn.Module, batch: MicroBatch) -> Tensor:
    """||g||^2 ||e_pad - e||^2 with Fisher's g; 1 + 1."""
    host: Any = model
    table_VH = host.get_input_embeddings().weight.detach().float()
    distance_BT = (table_VH[batch.replacement_token] - table_VH[batch.token_BT]).square().sum(-1)
    return by_importance(model, batch, "fisher") * distance_BT


ESTIMATORS = {
    "attention x2": partial(several_directions, count=2),
    "attention x3": partial(several_directions, count=3),
    "border 6": partial(borderline, copies=6, count=1),
    "border 4 x2": partial(borderline, copies=4, count=2),
    "norm x pad": norm_times_pad,
}
