"""Entropy of the distribution that each token was drawn from, in nats: a baseline of the paper that ignores the answer.

It needs no forward beside that of the log-probs; every reasoning row is projected to the vocabulary a second time.
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
