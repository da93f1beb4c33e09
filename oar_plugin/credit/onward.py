"""Importance for chains of reasoning: how much a token moves the answer *and what is written on the way to it*.

With the later steps teacher-forced, the answer of a chain (each step goes on from the last result) no longer depends on
early results, so importance that reads only the answer's rows pays the last step and treats the others like filler. Here
the rows of the reasoning count as well: an early result moves the predictions of the step that goes on from it. Three
things make that work:

* both parts are scaled to the largest score of their response before they are added, and the answer counts
  `ANSWER_WEIGHT` times, so that little is lost where the answer reads every result directly;
* predictions are flattened by `TEMPERATURE`. A copy is predicted with near certainty, and the Fisher information of a
  sure prediction is near zero however much it would change with what it copies;
* a token that was no decision earns no credit: the sum is multiplied by `1 - exp(-H / SURE)`, `H` the entropy of the
  distribution that the token was drawn from. Results are influential and uncertain; filler is uncertain only, form and
  copies are influential only.

With `F(rows)_t = ||d / de_t sum_s c_s . z_s||^2`, `c_s` a random root of the Fisher matrix of `softmax(z_s / TEMPERATURE)` with
signs of its own for each row (`oar_plugin.credit.gradient.fisher_coefficients`):

    I_t = (ANSWER_WEIGHT F(answer)_t / max F(answer) + F(reasoning)_t / max F(reasoning)) (1 - exp(-H_t / SURE))

Not in the paper. Cost: two backwards through one forward, where the Fisher norm takes one, and a projection of every reasoning
row to the vocabulary whose gradient reaches the hidden states. No graph over `[T, V]` logits is needed for that:
`dJ/dh_s = W^T c_s / T` can be computed from logits without a graph, a chunk of rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.credit.gradient import fisher_coefficients
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

TEMPERATURE = 4.0
ANSWER_WEIGHT = 3.0
SURE = 0.3
"""Entropy, in nats, at which a token counts as a decision by about two thirds."""


def flattened_coefficients(
    logits_NV: Tensor,
    sign_NV: Tensor,
    temperature: float = TEMPERATURE,
    vocabulary: VocabularyShard = WHOLE_VOCABULARY,
) -> Tensor:
    """What the logits of each row are multiplied by before a backward, `[N, V]`.

    Args:
        logits_NV: rows that predict reasoning, or answer tokens, without a graph.
        sign_NV: +1 and -1, independent between rows.
        temperature: of the distributions whose Fisher information is taken; 1 for the policy's own.
        vocabulary: the columns that this process holds.
    """
    return fisher_coefficients(logits_NV / temperature, sign_NV, vocabulary)


def onward_importance(answer_BL: Tensor, onward_BL: Tensor, entropy_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """The two Fisher norms of a response and its entropies as one importance.

    Args:
        answer_BL: `[B, L]`, not negative: squared gradient norms of the scalar over the answer's rows.
        onward_BL: the same over the rows that predict reasoning tokens.
        entropy_BL: in nats, of the distribution that each token was drawn from.
        reasoning_BL: bool, the tokens that are scored.

    Returns:
        `[B, L]`, between 0 and `ANSWER_WEIGHT + 1`, 0 outside the reasoning.
    """
    influence_BL = ANSWER_WEIGHT * _scaled(answer_BL, reasoning_BL) + _scaled(onward_BL, reasoning_BL)
    return influence_BL * -torch.expm1(-entropy_BL / SURE)


def _scaled(value_BL: Tensor, keep_BL: Tensor) -> Tensor:
    kept_BL = value_BL.masked_fill(~keep_BL, 0.0)
    highest_B1 = kept_BL.amax(-1, keepdim=True)
    return kept_BL / torch.where(highest_B1 > 0, highest_B1, 1.0)
