"""Gradient importance: how much the answer distribution moves when a token's input embedding moves.

Both estimators differentiate a scalar of the probe's logits with respect to the input embeddings, once:

* `fisher` - the Fisher norm. With `p` the probe's distribution and `u` one random sign vector,
  `c = sqrt(p) * u - p * <sqrt(p), u>`, `J = sum_v c_v z_v`, `I_t = ||dJ / de_t||^2`. Its expectation over `u` is the trace
  of token `t`'s block of the Fisher information of the answer with respect to the inputs. Not in the paper; it tracks
  exact OAR-P better than OAR-G does (Spearman 0.55 against 0.43 on a small trained model), needs no noise and so does
  not drown in bf16 rounding.
* `oar_g` - as published (arXiv 2601.07408): noise of scale sigma on the reasoning embeddings,
  `J = KL(P || P_noisy)`, `I_t = |<dJ / de_t, e_t>|`.

In both, `J` is linear in the logits once its coefficients are held fixed (for the KL, `dJ/dz = P_noisy - P`), so the
host only ever computes `sum(coefficient * logits)`. That is exact, keeps the vocabulary out of the graph but for the
answer's rows, and works unchanged where a rank holds only some rows: coefficients come from the summed logits,
the product from its own. A rank that holds some columns of the vocabulary passes its `VocabularyShard` and gets those
columns of the coefficients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.credit.noise import position_seeds, signs
from oar_plugin.credit.probe import AnswerRows, Probe
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard


def fisher_coefficients(logits_BV: Tensor, sign_BV: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY) -> Tensor:
    """`sqrt(p) * u - p * <sqrt(p), u>` for `p = softmax(logits)`: a random root of the softmax's Fisher matrix, `[B, V]`."""
    p_BV = vocabulary.softmax(logits_BV)
    root_BV = p_BV.sqrt() * sign_BV
    return root_BV - p_BV * vocabulary.total(root_BV.sum(-1, keepdim=True))


def kl_coefficients(
    clean_logits_BV: Tensor, noisy_logits_BV: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY
) -> Tensor:
    """Derivative of `KL(P || P_noisy)` with respect to the noisy logits: `P_noisy - P`, `[B, V]`.

    In float64: at sigma = 1e-3 the two distributions agree to four digits, and the difference is all there is.
    """
    return vocabulary.softmax(noisy_logits_BV.double()) - vocabulary.softmax(clean_logits_BV.double())


def joint_coefficients(logits_NV: Tensor, rows: AnswerRows, vocabulary: VocabularyShard = WHOLE_VOCABULARY) -> Tensor:
    """Derivative of `-mean_j log p(a_j)` with respect to each row: `(p - onehot(a_j)) * share`, `[N, V]`."""
    p_NV = vocabulary.softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)))
    return vocabulary.subtract_one_at(p_NV, rows.token_N) * rows.share_N[:, None]


def fisher_signs(
    probe: Probe, rows: AnswerRows, seed_B: Tensor, size: int, vocabulary: VocabularyShard = WHOLE_VOCABULARY
) -> Tensor:
    """The sign vectors of the Fisher norm: one a response (`[B, V]`), or one a row (`[N, V]`) for `answer_joint`.

    `size` is the number of columns that this process holds.

    AS-Joint is a product of one distribution per answer token; its Fisher matrix is the sum over tokens, which needs
    independent signs per row.
    """
    if probe == "answer_joint":
        return signs(position_seeds(seed_B[rows.response_N], rows.ordinal_N), vocabulary.start, size)
    return signs(seed_B, vocabulary.start, size)


def fisher_importance(gradient_TH: Tensor) -> Tensor:
    """`||g_t||^2`, float32 `[T]`."""
    return gradient_TH.float().square().sum(-1)


def saliency_importance(gradient_TH: Tensor, embedding_TH: Tensor) -> Tensor:
    """`|<g_t, e_t>|`, float32 `[T]`."""
    return (gradient_TH.float() * embedding_TH.float()).sum(-1).abs()
