"""OAR-G and OAR-P the way the published code goes about it (arXiv 2601.07408): what ours is compared with.

One response at a time, all with float32 logits of the whole sequence.

OAR-G: a clean forward, a noisy forward, one backward. The backward is a plain `J.backward()`, so it also computes the gradient
of every weight; the paper's text asks for the input embeddings' gradient only, and `weight_gradients=False` is that reading.

OAR-P: a clean forward, and one batch of copies of the whole sequence, each with the padding token in place of one of its
reasoning tokens. No cache. Where the batch does not fit into memory it is cut into several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory import free_bytes
from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import Unit

# Of the memory that is left, what a batch of copies may take: estimates are rough, and other work needs some too.
_MEMORY_SHARE = 0.5


def published_importance(
    model: nn.Module,
    token_L: Tensor,
    reasoning_start: int,
    reasoning_end: int,
    answer_start: int,
    answer_end: int,
    sigma: float = 1e-3,
    noise_RH: Tensor | None = None,
    weight_gradients: bool = True,
) -> Tensor:
    """Importance of the reasoning tokens of one response, with the AS-Mean probe.

    Args:
        model: causal LM.
        token_L: int64 `[L]`, one sequence; what follows the answer is cut off.
        reasoning_start: first reasoning token.
        reasoning_end: one after the last reasoning token.
        answer_start: first answer token.
        answer_end: one after the last answer token.
        sigma: scale of the noise.
        noise_RH: the noise itself, `[R, H]`; drawn when None.
        weight_gradients: whether the weights get a gradient too, as in the published code.

    Returns:
        `[R]`, `|<dJ/de_t, e_t>|` with `J = KL(P || P_noisy)`.
    """
    lm: Any = model
    token_1L = token_L[None, :answer_end]
    with torch.no_grad():
        clean_LV = _at_least_float32(lm(input_ids=token_1L, use_cache=False).logits[0])
        clean_log_V = clean_LV[answer_start - 1 : answer_end - 1].mean(0).log_softmax(-1)

    frozen = [] if weight_gradients else [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    embedding_1LH = lm.get_input_embeddings()(token_1L).detach().requires_grad_(True)
    full_1LH = torch.zeros_like(embedding_1LH)
    if noise_RH is None:
        noise_RH = torch.randn_like(full_1LH[0, reasoning_start:reasoning_end]) * sigma
    full_1LH[0, reasoning_start:reasoning_end] = noise_RH
    noisy_LV = _at_least_float32(lm(inputs_embeds=embedding_1LH + full_1LH, use_cache=False).logits[0])
    noisy_log_V = noisy_LV[answer_start - 1 : answer_end - 1].mean(0).log_softmax(-1)
    (clean_log_V.exp() * (clean_log_V - noisy_log_V)).sum().backward()
    for parameter in frozen:
        parameter.requires_grad_(True)

    gradient_LH = embedding_1LH.grad
    assert gradient_LH is not None
    return (gradient_LH[0] * embedding_1LH.detach()[0]).sum(-1).abs()[reasoning_start:reasoning_end]


@torch.no_grad()
def published_perturbation(
    model: nn.Module, token_T: Tensor, unit_list: Sequence[Unit], answer_start: int, padding: int, at_once: int
) -> Tensor:
    """Counterfactual importance of one response, with the AS-Mean probe.

    Args:
        model: causal LM.
        token_T: int64 `[T]`, one sequence that ends with its answer.
        unit_list: positions in the *sequence* that each copy replaces; one position each, as published.
        answer_start: first answer token.
        padding: what replaces them.
        at_once: copies in one forward; see `copies_that_fit`.

    Returns:
        `[U]` float64, `KL(P || P^(u))`.
    """
    lm: Any = model

    def outcomes(token_KT: Tensor) -> Tensor:
        logits_KTV = _at_least_float32(lm(input_ids=token_KT, use_cache=False).logits)
        # In float64, unlike the published code: a vocabulary a copy costs nothing, and makes the KL comparable.
        return log_distribution(logits_KTV[:, answer_start - 1 : -1].mean(1))

    reference_V = outcomes(token_T[None])[0]
    scores = []
    for begin in range(0, len(unit_list), at_once):
        group = unit_list[begin : begin + at_once]
        token_KT = token_T.repeat(len(group), 1)
        for place, unit in enumerate(group):
            token_KT[place, list(unit)] = padding
        scores.append(divergence(reference_V, outcomes(token_KT), "answer_mean"))
    return torch.cat(scores)


def copies_that_fit(model: nn.Module, length: int) -> int:
    """Whole sequences of `length` tokens that `published_perturbation` can put into one forward; at least one."""
    lm: Any = model
    config, weight = lm.config, next(model.parameters())
    logits = config.vocab_size * (4 if weight.dtype == torch.float32 else 4 + weight.element_size())
    activations = (8 * config.hidden_size + 3 * config.intermediate_size) * weight.element_size()
    return max(1, int(_MEMORY_SHARE * free_bytes(weight.device)) // (length * (logits + activations)))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
