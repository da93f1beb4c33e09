"""OAR-P, the paper's exact importance (arXiv 2601.07408): replace a token and see how far the answer's distribution moves.

    I_t = KL(P || P^(t))

with `P^(t)` the outcome when token `t` is replaced; for the probe `answer_joint` the drop of the answer's mean
log-probability. Exact, and one forward a reasoning token. Which copies run, and how their scores become a number a token, is
in `oar_plugin.credit.perturbation`; the actor runs them (`oar_plugin.passes.masked_copies`) or the rollout engines do.
"""

import math

from torch import Tensor

from oar_plugin.credit.importance.base import Copies, Importance
from oar_plugin.credit.probe import Probe


class OarP(Importance):
    name = "oar_p"
    help = "The paper's exact importance: each token replaced in a forward of its own."
    copies = Copies()
    arbitrary_scale = False


def log_distribution(logits_KV: Tensor) -> Tensor:
    """`log softmax` of pooled probe logits in float64, `[K, V]`: in float32 a small KL is off by more than its size."""
    return logits_KV.double().log_softmax(-1)


def divergence(reference: Tensor, outcome_K: Tensor, probe: Probe) -> Tensor:
    """How far the outcome of each copy is from the reference, `[K]` float64.

    Args:
        reference: `[V]` log-distribution (`log_distribution`); for `answer_joint` the scalar mean log-probability.
        outcome_K: the same of each copy, `[K, V]` or `[K]`.
        probe: which of the two.

    Returns:
        `KL(reference || outcome)`, or `reference - outcome` for `answer_joint`, which is negative where the copy makes
        the answer *more* likely. Tokens that the reference gives no mass (banned ones) count nothing.
    """
    if probe == "answer_joint":
        return reference.double() - outcome_K.double()
    terms_KV = reference.exp() * (reference - outcome_K)
    return terms_KV.masked_fill(reference == -math.inf, 0.0).sum(-1)
