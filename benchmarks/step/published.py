"""OAR-G the way the published code goes about it (arXiv 2601.07408): what ours is compared with.

One response at a time: a clean forward, a noisy forward, one backward, with float32 logits of the whole sequence. The
backward is a plain `J.backward()`, so it also computes the gradient of every weight; the paper's text asks for the input
embeddings' gradient only, and `weight_gradients=False` is that reading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oar_plugin.credit.answer import Segment


def published_importance(
    model: nn.Module,
    token_L: Tensor,
    segments_L: Tensor,
    sigma: float = 1e-3,
    noise_RH: Tensor | None = None,
    weight_gradients: bool = True,
) -> Tensor:
    """`|<dJ/de_t, e_t>|` of the reasoning tokens of one response, `[R]`, with `J = KL(P || P_noisy)` and the AS-Mean probe.

    Args:
        model: causal LM.
        token_L: int64, prompt and response.
        segments_L: `Segment` of each token.
        sigma: scale of the noise.
        noise_RH: the noise itself; drawn when None.
        weight_gradients: whether the weights get a gradient too, as in the published code.
    """
    lm: Any = model
    answer = (segments_L == Segment.ANSWER).nonzero()[:, 0]
    rows, end = answer - 1, int(answer[-1]) + 1
    reasoning_L = segments_L[:end] == Segment.REASONING
    token_1L = token_L[None, :end]

    def log_outcome(**inputs: Tensor) -> Tensor:
        logits_LV = lm(**inputs, use_cache=False).logits[0]
        logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
        return logits_LV[rows].mean(0).log_softmax(-1)

    with torch.no_grad():
        clean_V = log_outcome(input_ids=token_1L)
    frozen = [] if weight_gradients else [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    embedding_1LH = lm.get_input_embeddings()(token_1L).detach().requires_grad_(True)
    full_1LH = torch.zeros_like(embedding_1LH)
    full_1LH[0, reasoning_L] = torch.randn_like(full_1LH[0, reasoning_L]) * sigma if noise_RH is None else noise_RH
    noisy_V = log_outcome(inputs_embeds=embedding_1LH + full_1LH)
    (clean_V.exp() * (clean_V - noisy_V)).sum().backward()
    for parameter in frozen:
        parameter.requires_grad_(True)
    return (embedding_1LH.grad[0] * embedding_1LH.detach()[0]).sum(-1).abs()[reasoning_L]
