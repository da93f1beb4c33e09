"""Importance for chains of reasoning: how much a token moves the answer *or what is written on the way to it*.

With the later steps teacher-forced, the answer of a chain (each step goes on from the last result) no longer depends on
early results, so importance that reads only the answer's rows pays the last step and treats the others like filler. Here
the rows of the reasoning count as well: an early result moves the predictions of the step that goes on from it.

With `F(w)_t = ||d / de_t sum_s sqrt(w_s) c_s . z_s||^2`, where `c_s` is a random root of the Fisher matrix of
`softmax(z_s / TEMPERATURE)` with signs of its own for each row (`fisher_coefficients`), and `H_t` the entropy of the
distribution that token `t` was drawn from, at the temperature that it was drawn with:

    influence_t = max(F(answer)_t / max_t F(answer), F(exp(-2 H) on reasoning)_t / max_t F(...))
    I_t = influence_t^(1/3) (1 - exp(-H_t / SURE)) exp(-H_t / NOISE)

* The larger of two parts, each on its own scale: a token is paid for the answer or for what leads to it. Rows of high
  entropy hardly count: what moves them moves filler.
* `TEMPERATURE`: a copy is predicted with near certainty, and the Fisher information of a sure prediction is near zero
  however much it would change with what it copies. A flatter distribution shows it.
* The cube root: squared gradients of equally causal tokens differ tenfold, and the gate would see the largest alone.
* The factors in `H`: a token that was no choice (form, a copy) earns nothing, and one drawn from an almost flat
  distribution was hardly a choice either.

The answer is read row by row: the probes `answer_mean` and `answer_joint` are the same here, and `last` is its first row.

Not in the paper. It estimates no single quantity: each part does, up to scale, and the rest is shape, chosen on one task
whose vocabulary is tens of words. How it does: `docs/evidence/studies.md`.

Cost: two forwards and two backwards (FSDP1 gathers its weights for the first backward through a graph only), and a
projection of every reasoning row to the vocabulary, a chunk of rows at a time and without a graph.
"""

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Importance, Parts, Rows, squared_norm
from oar_plugin.credit.importance.fisher import fisher_coefficients

TEMPERATURE = 4.0
ROOT = 3.0
SURE = 0.3
"""Nats: a token of this entropy counts as a choice by about two thirds."""
NOISE = 2.0
"""Nats: a token of this entropy counts a third of what it would without the discount for noise."""

_ANSWER, _REASONING = 0, 1


class Onward(Importance):
    name = "onward"
    help = (
        "How much a token moves the answer or what is written on the way to it, two backwards; for chains of reasoning, "
        "with the gate two_level. The probes answer_mean and answer_joint are the same to it."
    )
    backwards = (Backward("answer"), Backward("reasoning"))
    reads = frozenset({"entropy"})
    arbitrary_scale = False

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        root_NV = fisher_coefficients(rows.logits_NV / TEMPERATURE, rows.signs(), rows.vocabulary)
        if number == _ANSWER:
            return root_NV
        assert rows.entropy_N is not None
        return row_weights(rows.entropy_N).sqrt()[:, None] * root_NV

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient)

    def combine(self, parts: Parts) -> Tensor:
        answer_BL, reasoning_BL = (to_highest(score_BL, parts.reasoning_BL) for score_BL in parts.score_KBL)
        return torch.maximum(answer_BL, reasoning_BL).pow(1 / ROOT) * choice(parts.entropy_BL)


def row_weights(entropy: Tensor) -> Tensor:
    """Weight of the rows that predict reasoning tokens, of the shape of `entropy` (nats)."""
    return torch.exp(-2 * entropy)


def choice(entropy: Tensor) -> Tensor:
    """How much of a choice a token was, in [0, 1], of the shape of `entropy` (nats)."""
    return -torch.expm1(-entropy / SURE) * torch.exp(-entropy / NOISE)


def to_highest(score_BL: Tensor, keep_BL: Tensor) -> Tensor:
    """Scores as shares of the highest of their response; 0 elsewhere, and where nothing is above 0."""
    kept_BL = score_BL.masked_fill(~keep_BL, 0.0)
    highest_B1 = kept_BL.amax(-1, keepdim=True)
    return kept_BL / torch.where(highest_B1 > 0, highest_B1, 1.0)
