"""Gradient importance: how much the answer distribution moves when a token's input embedding moves.

Two estimators differentiate a scalar of the probe's logits with respect to the input embeddings, once:

* `fisher` - the Fisher norm. With `p` the probe's distribution and `u` one random sign vector,
  `c = sqrt(p) * u - p * <sqrt(p), u>`, `J = sum_v c_v z_v`, `I_t = ||dJ / de_t||^2`. Its expectation over `u` is the trace
  of token `t`'s block of the Fisher information of the answer with respect to the inputs. Not in the paper; it tracks
  exact OAR-P better than OAR-G does (Spearman 0.68 against 0.43 on twelve small trained models, `oar bench fidelity`), needs
  no noise and so does not drown in bf16 rounding.
* `oar_g` - as published (arXiv 2601.07408): noise of scale sigma on the reasoning embeddings,
  `J = KL(P || P_noisy)`, `I_t = |<dJ / de_t, e_t>|`.

In both, `J` is linear in the logits once its coefficients are held fixed (for the KL, `dJ/dz = P_noisy - P`), so the
host only ever computes `sum(coefficient * logits)`. That is exact, keeps the vocabulary out of the graph but for the
answer's rows, and works unchanged where a rank holds only some rows: coefficients come from the summed logits,
the product from its own. A rank that holds some columns of the vocabulary passes its `VocabularyShard` and gets those
columns of the coefficients.

A third, attention patching (`principal_coefficients`, `replaced_key_effect`, `patching_importance`), asks what a token's
*replacement* by PAD does to every attention layer, with the softmax taken again. It takes one forward and one backward too,
and more of an engine: queries, keys, values and the gradient at the heads' outputs of every layer, and the keys and values of
a PAD. Not in the paper. On the same models Spearman is 0.87, and 0.81 of exact OAR-P's top 20 % are found where `fisher` finds
0.67.
"""

from __future__ import annotations

import math

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


def principal_coefficients(
    logits_BV: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY, iterations: int = 30
) -> Tensor:
    """The largest part of the softmax's Fisher matrix: `sqrt(lambda) * v` for its leading eigenvector `v`, `[B, V]`.

    What `fisher_coefficients` draws at random, without the draw: of all directions the one in which the logits move the
    distribution most. For an answer that hesitates between two tokens it is their difference, and nothing else counts.
    Power iteration from the most likely token against the rest, `O(iterations * V)`.
    """
    p_BV = vocabulary.softmax(logits_BV.float())
    top_B1 = vocabulary.largest(p_BV.amax(-1, keepdim=True))
    # As the probabilities lie, but the most likely token counts more than all others: never orthogonal to what is sought.
    v_BV = torch.where(p_BV == top_B1, 1.0, -p_BV)
    tiny = torch.finfo(torch.float32).tiny
    length_B1 = torch.ones_like(top_B1)
    for _ in range(iterations):
        v_BV = p_BV * (v_BV - vocabulary.total((p_BV * v_BV).sum(-1, keepdim=True)))
        length_B1 = vocabulary.total(v_BV.square().sum(-1, keepdim=True)).sqrt()
        v_BV = v_BV / length_B1.clamp_min(tiny)
    return length_B1.sqrt() * v_BV


def replaced_key_effect(
    query_KTD: Tensor,
    key_KTD: Tensor,
    value_KTD: Tensor,
    gradient_KTD: Tensor,
    other_key_KTD: Tensor,
    other_value_KTD: Tensor,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:
    """What one attention layer does to the probe when a position's key and value are replaced by others.

    A gradient takes attention for linear, and where a softmax is saturated it is not (AtP*, arXiv 2403.00745). Here the
    softmax of every later query is taken again, exactly, with the one logit replaced; only what follows the head's output
    is linear. With `a_it` the attention of query `i` on `t`, `b_it` the same after the replacement and `o_i` the head's
    output, the output changes by `d_it = r (o_i - a_it v_t) + b_it v'_t - o_i`, `r = (1 - b_it) / (1 - a_it)`.

    Args:
        query_KTD: `[K, T, D]`, the heads of one sequence or of several, rotated, scaled as the model does (by `1 / sqrt(D)`).
        key_KTD: `[K, T, D]`, rotated, repeated where heads share them.
        value_KTD: the same of the values.
        gradient_KTD: gradient of the probe's scalar with respect to each head's output, before the output projection.
        other_key_KTD: what stands in for each key, rotated to its position.
        other_value_KTD: what stands in for each value.
        chunk: queries at a time; memory is a few times `K * chunk * T`.

    Returns:
        Two float32 `[K, T]`, both sums over later queries. Add up each over the heads of a sequence and over layers.
        First `sum <g_i, d_it>`, the signed effect; contributions may cancel. Then `sum ||g_i||^2 ||d_it||^2`, its bound,
        in which nothing cancels.
    """
    query_KTD, key_KTD, value_KTD, gradient_KTD, other_key_KTD, other_value_KTD = (
        x.float() for x in (query_KTD, key_KTD, value_KTD, gradient_KTD, other_key_KTD, other_value_KTD)
    )
    length = key_KTD.shape[1]
    effect_KT, bound_KT = query_KTD.new_zeros(2, *query_KTD.shape[:2])
    value_2_KT, other_2_KT = value_KTD.square().sum(-1), other_value_KTD.square().sum(-1)
    both_KT = (value_KTD * other_value_KTD).sum(-1)
    place_T = torch.arange(length, device=query_KTD.device)
    for begin in range(0, length, chunk):
        # Queries [begin, end) look at keys [0, end).
        end = min(begin + chunk, length)
        q, g = query_KTD[:, begin:end], gradient_KTD[:, begin:end]
        k, v, other_k, other_v = (x[:, :end] for x in (key_KTD, value_KTD, other_key_KTD, other_value_KTD))
        future = place_T[None, :end] > place_T[begin:end, None]
        logit_KQT = (q @ k.mT).masked_fill_(future, -math.inf)
        shift_KQT = ((q @ other_k.mT) - logit_KQT).masked_fill_(future, 0.0)
        log_a = logit_KQT.log_softmax(-1)
        a = log_a.exp()
        b = (log_a - torch.log1p(-a) + shift_KQT).sigmoid()
        output_KQD = a @ v
        # The key that a query looks at most may have all of it; what the others would give is then taken from their own
        # softmax. Every other key has at most half.
        top_KQ1 = logit_KQT.argmax(-1, keepdim=True)
        rest_KQT = logit_KQT.scatter(-1, top_KQ1, -math.inf)
        rest_KQ1 = rest_KQT.logsumexp(-1, keepdim=True)
        b_KQ1 = ((logit_KQT + shift_KQT).gather(-1, top_KQ1) - rest_KQ1).sigmoid()
        other_KQD = other_v.gather(1, top_KQ1.expand(-1, -1, other_v.shape[-1]))
        change_KQD = (1 - b_KQ1) * ((rest_KQT - rest_KQ1).exp() @ v) + b_KQ1 * other_KQD - output_KQD
        # A query on its own position is the token's own business: what it becomes is in the keys of the next layer.
        change_KQD = change_KQD.masked_fill(top_KQ1 == place_T[begin:end, None], 0.0)
        effect_KT.scatter_add_(1, top_KQ1[..., 0], (g * change_KQD).sum(-1))
        bound_KT.scatter_add_(1, top_KQ1[..., 0], g.square().sum(-1) * change_KQD.square().sum(-1))

        done_KQT = torch.zeros_like(future).expand_as(a).scatter(-1, top_KQ1, True)
        done_KQT |= place_T[None, :end] == place_T[begin:end, None]
        a, b = a.masked_fill(done_KQT, 0.0), b.masked_fill(done_KQT, 0.0)
        ratio = (1 - b) / (1 - a)
        of_output, of_value = ratio - 1, -ratio * a
        effect_KQT = of_output * (g * output_KQD).sum(-1, keepdim=True)
        effect_KQT += of_value * (g @ v.mT) + b * (g @ other_v.mT)
        effect_KT[:, :end] += effect_KQT.sum(1)
        length_2 = of_output**2 * output_KQD.square().sum(-1, keepdim=True)
        length_2 += of_value**2 * value_2_KT[:, None, :end] + b**2 * other_2_KT[:, None, :end]
        length_2 += 2 * of_output * (of_value * (output_KQD @ v.mT) + b * (output_KQD @ other_v.mT))
        length_2 += 2 * of_value * b * both_KT[:, None, :end]
        bound_KT[:, :end] += (g.square().sum(-1, keepdim=True) * length_2.clamp_min_(0.0)).sum(1)
    return effect_KT, bound_KT


def patching_importance(effect_T: Tensor, bound_T: Tensor) -> Tensor:
    """`|effect| * sqrt(bound)`, the geometric mean of the squared effect and its bound, `[T]`.

    The effect is what exact OAR-P measures, to first order behind each head; where contributions cancel by accident, or
    move the answer in a direction that one backward does not see, the bound keeps the token from zero.
    """
    return effect_T.abs() * bound_T.sqrt()
