"""Gradient importance of one batch with a HuggingFace model, as an engine computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oar_plugin.hosts.micro_batch import MicroBatchScorer
from oar_plugin.passes.taps import ModelTaps


def gradient_scores(model: nn.Module, token_BT: Tensor, scorer: MicroBatchScorer) -> Tensor:
    """Importance `[B, T]` of the estimator that `scorer.request` names, `fisher` or `oar_g`, averaged over its draws.

    Args:
        model: causal LM in eval mode; its parameters and their gradients are left alone.
        token_BT: int64, the batch.
        scorer: of this batch; its positions are those of the flattened `[B * T]`.
    """
    noisy, draws = scorer.request.importance == "oar_g", scorer.request.num_draws
    total_BT = torch.zeros(token_BT.shape, device=token_BT.device)
    with ModelTaps(model) as taps:

        def forward(draw: int | None) -> Tensor:
            taps.prepare(*scorer.tap(draw), rows_only=True)
            model(input_ids=token_BT, use_cache=False)
            assert taps.answer_logits is not None
            return taps.answer_logits

        if noisy:
            with torch.no_grad():
                scorer.remember_clean(forward(None))
        logits_NV = forward(0)
        for draw in range(draws):
            if noisy and draw:
                logits_NV = forward(draw)
            assert taps.embedding is not None
            # Signs share one forward; every draw of noise has its own.
            (gradient,) = torch.autograd.grad(
                scorer.scalar(logits_NV, draw), taps.embedding, retain_graph=not noisy and draw < draws - 1
            )
            total_BT += scorer.importance(gradient, taps.embedding.detach())
    return total_BT / draws
