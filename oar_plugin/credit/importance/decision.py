"""How far the choice that was made at a token moves what is decided later, the answer among it, in nats. One backward.

With later steps teacher-forced, the answer of a chain (each step goes on from the last result) no longer depends on early
results, so importance that reads the answer alone pays the last step and treats the others like filler. Here every later row
counts. A row's margin is the logit of its likeliest token less that of the next; with random signs `u` a row and `H` the
entropy of a row's distribution, at the temperature that tokens were drawn with,

    J = sum_rows u exp(-H) margin        I_t = ||dJ / de_t|| ||e_t|| / sqrt(d) * (1 - exp(-(H_t / SURE)^2))

* The margin of a sure row is as steep as that of an open one, so nothing saturates: a copy shows what it depends on without
  a temperature. Of a sure row the next token is often one that is never written, so a long tail of the vocabulary changes
  scores (`benchmarks/results/soundness.md`). Rows of high entropy hardly count: what moves them moves filler.
* `||g|| ||e|| / sqrt(d)` is how far a step of the embedding's length in a random direction moves a margin: no unit of the
  embeddings is left. A token that was no choice (form, a copy) moves nothing, by its entropy.

Not in the paper. What it marks: `benchmarks/results/marks_cpu.md`.
"""

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Importance, Parts, Rows, squared_norm
from oar_plugin.credit.noise import signs
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

SURE = 0.5
"""Nats: a token of this entropy counts by about two thirds, one of a tenth of it by a hundredth.

Chosen by what is marked, on models 0 and 1 of the tasks of `benchmarks.learning`, before anything was judged. Square, so that
the long tail of a large vocabulary, a few hundredths of a nat, does not make a choice of a sure token."""


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
    """Derivative of the highest logit less the next, `[N, V]`.

    Of equal logits, as half precision has many, the first column counts as the higher. A row with one finite logit has no next.
    """
    first_NV = _is_highest(logits_NV, vocabulary)
    next_NV = _is_highest(logits_NV.masked_fill(first_NV, -torch.inf), vocabulary)
    return first_NV.to(logits_NV.dtype) - next_NV.to(logits_NV.dtype)


def _is_highest(logits_NV: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Bool `[N, V]`, true at the first column of the whole vocabulary that has the row's highest logit, if it is finite."""
    width = logits_NV.shape[-1]
    own_N1 = logits_NV.new_full((len(logits_NV), 1), -torch.inf)
    at_N1 = torch.zeros_like(own_N1, dtype=torch.long)
    if width:  # a shard may hold nothing but padding
        own_N1, at_N1 = logits_NV.max(-1, keepdim=True)
    highest_N1 = vocabulary.largest(own_N1.clone())  # which may write into it
    column_V = torch.arange(vocabulary.start, vocabulary.start + width, device=logits_NV.device)
    here_N1 = (own_N1 == highest_N1) & own_N1.isfinite()
    nearest_N1 = vocabulary.largest(torch.where(here_N1, -(at_N1 + vocabulary.start), -torch.inf))
    return column_V == -nearest_N1
