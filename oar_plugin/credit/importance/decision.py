"""How far the choice of a token moves later decisions, including the answer's, in nats. One backward. Not in the paper.

With later steps teacher-forced, the answer of a chain depends on its last step alone, so here every later row of logits counts.
With a random sign `u` per row, its highest logit minus the second highest, `margin`, and its entropy `H` as sampled:

    J = sum_rows u exp(-H) margin        I_t = ||dJ / de_t|| ||e_t|| / sqrt(d) * (1 - exp(-(H_t / SURE)^2))

* A margin does not saturate. A sure row's second token is often never written, so a long tail of the vocabulary changes the
  scores (`benchmarks/results/soundness.md`). Rows of high entropy count little: what moves them moves filler.
* `||g|| ||e|| / sqrt(d)`: how far a margin moves if the embedding moves by its own length in a random direction. The last
  factor is 0 for a token that was not a choice. `benchmarks/results/marks_cpu.md` shows which tokens score high.
"""

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Importance, Parts, Rows, squared_norm
from oar_plugin.credit.noise import signs
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

SURE = 0.5
"""Nats. Chosen by which tokens score high, on models 0 and 1 of the tasks of `benchmarks.learning`, before any comparison of
learning. The square keeps the tail of a large vocabulary, a few hundredths of a nat, from making a sure token a choice."""


class Decision(Importance):
    name = "decision"
    help = (
        "How far the choice at a token moves later margins, the answer's among them, in nats; one backward, "
        "for chains of reasoning."
    )
    backwards = (Backward("later"),)
    reads = frozenset({"entropy"})
    arbitrary_scale = False

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        assert rows.entropy_N is not None
        sign_N1 = signs(rows.seed_N, 0, 1)
        return margin_coefficients(rows.logits_NV, rows.vocabulary) * sign_N1 * torch.exp(-rows.entropy_N)[:, None]

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient) * squared_norm(embedding) / embedding.shape[-1]

    def combine(self, parts: Parts) -> Tensor:
        return parts.score_KBL[0].sqrt() * -torch.expm1(-(parts.entropy_BL / SURE).square())


def margin_coefficients(logits_NV: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY) -> Tensor:
    """Derivative of the highest logit minus the second highest, `[N, V]`.

    Among equal logits, common in half precision, the first column is the highest. With one finite logit there is no second.
    """
    first_NV = _is_highest(logits_NV, vocabulary)
    next_NV = _is_highest(logits_NV.masked_fill(first_NV, -torch.inf), vocabulary)
    return first_NV.to(logits_NV.dtype) - next_NV.to(logits_NV.dtype)


def _is_highest(logits_NV: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Bool `[N, V]`, true at the first column of the whole vocabulary with the row's highest logit, if that is finite."""
    width = logits_NV.shape[-1]
    own_N1 = logits_NV.new_full((len(logits_NV), 1), -torch.inf)
    at_N1 = torch.zeros_like(own_N1, dtype=torch.long)
    if width:  # a shard of padding only has no columns
        own_N1, at_N1 = logits_NV.max(-1, keepdim=True)
    highest_N1 = vocabulary.largest(own_N1.clone())  # `largest` may write into its argument
    column_V = torch.arange(vocabulary.start, vocabulary.start + width, device=logits_NV.device)
    here_N1 = (own_N1 == highest_N1) & own_N1.isfinite()
    nearest_N1 = vocabulary.largest(torch.where(here_N1, -(at_N1 + vocabulary.start), -torch.inf))
    return column_V == -nearest_N1
