"""Entropy of the distribution that each token was drawn from, in nats: a baseline that the paper compares with.

It looks at no answer: what was hard to predict counts. One forward, the one that log-probs need anyway; every reasoning row
is projected to the vocabulary a second time.
"""

from torch import Tensor

from oar_plugin.credit.importance.base import Importance, Parts


class Entropy(Importance):
    name = "entropy"
    help = "Entropy of the distribution that each token was drawn from; a baseline, it looks at no answer."
    reads = frozenset({"entropy"})
    arbitrary_scale = False

    def combine(self, parts: Parts) -> Tensor:
        return parts.entropy_BL
