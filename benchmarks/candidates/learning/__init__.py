"""Credit that was tried in the study of learning and is not in the package, and the controls that look at no influence.

`python -m benchmarks learning` trains with these where a plan names them, as `python:benchmarks.candidates.learning:CLASS`;
README.md says how others did.
"""

import torch
from oar_plugin.credit.importance.decision import Decision
from torch import Tensor

from benchmarks.candidates.learning.onward import Onward, decision
from oar_plugin.credit.gate import relative, two_level
from oar_plugin.credit.importance import Importance, Parts

__all__ = ["Doubted", "EntropyFactor", "Onward", "inverted", "spare"]


class EntropyFactor(Importance):
    name = "EntropyFactor"
    help = "A control: the factors of onward that look at entropy alone, without any influence."
    reads = frozenset({"entropy"})
    arbitrary_scale = False

    def combine(self, parts: Parts) -> Tensor:
        return decision(parts.entropy_BL)


class Doubted(Decision):
    name = "Doubted"
    help = "The influence of decision, without its entropy factor, times one less the probability that the token had."
    reads = frozenset({"entropy", "log_prob"})

    def combine(self, parts: Parts) -> Tensor:
        return parts.score_KBL[0].sqrt() * -torch.expm1(parts.log_prob_BL)


def inverted(importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.85, beta: float = 2.0) -> Tensor:
    """A control, the gate `two_level` turned round: what it boosts is damped, by the same factor, with the mass restored.

    If an importance says something, learning with this gate should be worse than GRPO (arXiv 2602.09331 inverts its own so).
    """
    inverse_BL = 1 / two_level(importance_BL, reasoning_BL, tau, beta).double()
    return torch.where(reasoning_BL, relative(inverse_BL, reasoning_BL), 1.0).float()


def spare(
    importance_BL: Tensor, reasoning_BL: Tensor, doubt_BL: Tensor, negative_B1: Tensor, beta: float = 2.0
) -> Tensor:
    """Weights that do not blame what the policy was sure of: in responses worse than their group, decisions pay by doubt.

    With `f = s^2 / (1 + s^2)` for importance `s` in nats, and `d` one less the probability that a token had,

        w = 1 + beta f                            in responses better than their group
        w = (1 - f) + f (1 + beta) d              in the others

    so that a token that is no decision at all (`f` = 0) weighs the same in both: the push on what all siblings share cancels,
    as it does in GRPO. For that reason the mass is restored over the batch and not response by response. Small decisions
    are not balanced so: filler and form weigh a tenth less in the worse responses, on average.
    """
    square_BL = importance_BL.square()
    decisive_BL = square_BL / (1 + square_BL)
    better_BL = 1 + beta * decisive_BL
    worse_BL = (1 - decisive_BL) + decisive_BL * (1 + beta) * doubt_BL
    weight_BL = torch.where(negative_B1, worse_BL, better_BL).masked_fill(~reasoning_BL, 0.0)
    mean = weight_BL.sum() / reasoning_BL.sum().clamp_min(1)
    return torch.where(reasoning_BL, weight_BL / mean.clamp_min(1e-9), 1.0)
