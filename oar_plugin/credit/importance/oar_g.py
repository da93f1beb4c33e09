"""OAR-G, the paper's gradient estimator (arXiv 2601.07408): KL under noise, gradient times input.

With `P` from a noise-free forward, `P_noisy` from one with noise `N(0, sigma^2)` on the reasoning embeddings:

    J = KL(P || P_noisy)    dJ/dz = P_noisy - P        AS-Joint: J = -mean_j log p(a_j)    dJ/dz_j = (p_j - onehot(a_j)) share_j

and `I_t = |<dJ / de_t, e_t>|`. One noise-free forward, then a forward and a backward per draw.
"""

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Importance, Parts, Rows, saliency
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard


class OarG(Importance):
    name = "oar_g"
    help = "The paper's gradient estimator: KL of the answer under noise on the embeddings, gradient times input."
    backwards = (Backward("probe", noise=True),)
    arbitrary_scale = False

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        # Divided by sigma against underflow in half precision; `combine` multiplies by it.
        if rows.token_N is not None:
            return joint_coefficients(rows.logits_NV, rows.token_N, rows.vocabulary) / rows.sigma
        assert rows.clean_NV is not None
        return kl_coefficients(rows.clean_NV, rows.logits_NV, rows.vocabulary) / rows.sigma

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return saliency(gradient, embedding)

    def combine(self, parts: Parts) -> Tensor:
        return parts.score_KBL[0] * parts.sigma


def kl_coefficients(
    clean_logits_NV: Tensor, noisy_logits_NV: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY
) -> Tensor:
    """dKL(P || P_noisy) / d(noisy logits): `P_noisy - P`, float64 `[N, V]`: at sigma = 1e-3 the two agree to four digits."""
    return vocabulary.softmax(noisy_logits_NV.double()).sub_(vocabulary.softmax(clean_logits_NV.double()))


def joint_coefficients(logits_NV: Tensor, token_N: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY) -> Tensor:
    """Derivative of `-log p(token)` with respect to each row: `p - onehot(token)`, `[N, V]`."""
    p_NV = vocabulary.softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)))
    return vocabulary.subtract_one_at(p_NV, token_N)
