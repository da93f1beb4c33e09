"""Importance for chains of reasoning: how much a token moves the answer *or what is written on the way to it*.

With the later steps teacher-forced, the answer of a chain (each step goes on from the last result) no longer depends on
early results, so importance that reads only the answer's rows pays the last step and treats the others like filler. Here
the rows of the reasoning count as well: an early result moves the predictions of the step that goes on from it.

With `F(w)_t = ||d / de_t sum_s sqrt(w_s) c_s . z_s||^2`, where `c_s` is a random root of the Fisher matrix of
`softmax(z_s / TEMPERATURE)` with signs of its own for each row (`oar_plugin.credit.gradient.fisher_coefficients`), and
`H_t` the entropy of the distribution that token `t` was drawn from:

    influence_t = max(F(answer)_t / max_t F(answer), F(exp(-2 H) on reasoning)_t / max_t F(...))
    I_t = influence_t^(1/3) (1 - exp(-H_t / SURE)) exp(-H_t / NOISE)

* The larger of two parts, each on its own scale: a token is paid for the answer or for what leads to it. Rows of high
  entropy hardly count: what moves them moves filler.
* `TEMPERATURE`: a copy is predicted with near certainty, and the Fisher information of a sure prediction is near zero
  however much it would change with what it copies. Flattened, it speaks.
* The cube root: squared gradients of equally causal tokens differ tenfold, and the gate would see the largest alone.
* The factors in `H`: a token that was no decision (form, a copy) earns nothing, and one drawn from an almost flat
  distribution was hardly a decision either.

Not in the paper. `algorithm.oar.importance=onward`, for the gate `two_level` with tau 0.85. It estimates no single quantity:
each part does, up to scale, and the rest is shape, chosen on one task. There it beat GRPO, with a small trainer and through
verl; on three other tasks it was neither ahead nor behind by more than the noise (`benchmarks/learning_two_level`,
`benchmarks/learning_verl.md`). With the paper's gate it did not beat GRPO (`benchmarks/learning_variants.md`).

Cost: two backwards, where the Fisher norm takes one, and a projection of every reasoning row to the vocabulary whose
gradient reaches the hidden states. No graph over `[T, V]` logits is needed for that: `dJ/dh_s = sqrt(w_s) W^T c_s` is
computed from logits without a graph, a chunk of rows at a time (`oar_plugin.hosts.onward`). verl's engines make a second
forward for the second backward, because FSDP1 gathers its weights for the first backward through a graph only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.credit.gradient import fisher_coefficients
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

TEMPERATURE = 4.0
ROOT = 3.0
SURE = 0.3
"""Nats: a token of this entropy counts as a decision by about two thirds."""
NOISE = 2.0
"""Nats: a token of this entropy counts a third of what it would without the discount for noise."""


def row_weights(entropy: Tensor) -> Tensor:
    """Weight of the rows that predict reasoning tokens, float32 of the shape of `entropy`.

    Args:
        entropy: in nats, of the distribution that each token was drawn from.
    """
    return torch.exp(-2 * entropy.float())


def onward_coefficients(
    logits_NV: Tensor,
    weight_N: Tensor,
    sign_NV: Tensor,
    temperature: float = TEMPERATURE,
    vocabulary: VocabularyShard = WHOLE_VOCABULARY,
) -> Tensor:
    """What the logits of each row are multiplied by in the scalar of one backward, `[N, V]`.

    Args:
        logits_NV: rows, without a graph.
        weight_N: of each row, not negative: 1 for the answer's, `row_weights` for those of the reasoning.
        sign_NV: +1 and -1, independent between rows.
        temperature: of the distributions whose Fisher information is taken; 1 for the policy's own.
        vocabulary: the columns that this process holds.
    """
    return weight_N.sqrt()[:, None] * fisher_coefficients(logits_NV / temperature, sign_NV, vocabulary)


def onward_importance(answer_BL: Tensor, onward_BL: Tensor, entropy_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """The two Fisher norms of a response and its entropies as one importance.

    Args:
        answer_BL: `[B, L]`, not negative: squared gradient norms of the scalar over the answer's rows.
        onward_BL: the same over the rows that predict reasoning tokens, weighted with `row_weights`.
        entropy_BL: in nats, of the distribution that each token was drawn from.
        reasoning_BL: bool, the tokens that are scored.

    Returns:
        `[B, L]` in [0, 1], 0 outside the reasoning.
    """
    influence_BL = torch.maximum(_scaled(answer_BL, reasoning_BL), _scaled(onward_BL, reasoning_BL))
    decision_BL = -torch.expm1(-entropy_BL / SURE) * torch.exp(-entropy_BL / NOISE)
    return influence_BL.pow(1 / ROOT) * decision_BL


def _scaled(value_BL: Tensor, keep_BL: Tensor) -> Tensor:
    kept_BL = value_BL.masked_fill(~keep_BL, 0.0)
    highest_B1 = kept_BL.amax(-1, keepdim=True)
    return kept_BL / torch.where(highest_B1 > 0, highest_B1, 1.0)
