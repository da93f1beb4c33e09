"""OAR-P, the paper's exact importance (arXiv 2601.07408): how far the answer's distribution moves if a token is replaced.

    I_t = KL(P || P^(t))

with `P^(t)` the outcome with token `t` replaced; for the probe `answer_joint` the drop of the answer's mean log-probability.
One forward per scored token, or unit of tokens. `oar_plugin.credit.perturbation` lists the copies and makes importance of
their scores; the actor (`oar_plugin.passes.copies`) or the rollout engines run them.
"""

import math

from torch import Tensor

from oar_plugin.credit.importance.base import Importance
from oar_plugin.credit.probe import Probe
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard


class OarP(Importance):
    name = "oar_p"
    help = "The paper's exact importance: each token replaced in a forward of its own."
    copies = True
    arbitrary_scale = False


def log_distribution(logits_KV: Tensor) -> Tensor:
    """`log softmax` of pooled probe logits in float64, `[K, V]`; in float32 the error of a small KL is larger than the KL."""
    return logits_KV.double().log_softmax(-1)


def divergence(
    reference: Tensor, outcome_K: Tensor, probe: Probe, vocabulary: VocabularyShard = WHOLE_VOCABULARY
) -> Tensor:
    """Returns `KL(reference || outcome)` of each copy, float64 `[K]`, for log-distributions `[V]` or `[K, V]`, and `[K, V]`.

    For the probe `answer_joint`, both are mean log-probabilities, a scalar or `[K]`, and `[K]`, and the result is their
    difference.
    """
    if probe == "answer_joint":
        return reference.double() - outcome_K.double()
    terms_KV = reference.exp() * (reference - outcome_K)
    return vocabulary.total(terms_KV.masked_fill(reference == -math.inf, 0.0).sum(-1))  # of banned tokens
