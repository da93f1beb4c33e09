"""Credit that was tried in the study of learning and is not in the package, and the controls that look at no influence.

`python -m benchmarks learning` trains with these where a plan names them, as `python:benchmarks.candidates.learning:CLASS`;
README.md says how others did.
"""

import torch
from torch import Tensor

from benchmarks.candidates.learning.onward import Onward, choice
from oar_plugin.credit.gate import relative, two_level
from oar_plugin.credit.importance import Importance, Parts

__all__ = ["EntropyFactor", "Onward", "Position", "inverted"]


class Position(Importance):
    name = "Position"
    help = "A control: the later, the more."
    arbitrary_scale = False

    def combine(self, parts: Parts) -> Tensor:
        return parts.reasoning_BL.float().cumsum(-1)


class EntropyFactor(Importance):
    name = "EntropyFactor"
    help = "A control: the factors of onward that look at entropy alone, without any influence."
    reads = frozenset({"entropy"})
    arbitrary_scale = False

    def combine(self, parts: Parts) -> Tensor:
        return choice(parts.entropy_BL)


def inverted(importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.85, beta: float = 2.0) -> Tensor:
    """A control, the gate `two_level` turned round: what it boosts is damped, by the same factor, with the mass restored.

    If an importance says something, learning with this gate should be worse than GRPO (arXiv 2602.09331 inverts its own so).
    """
    inverse_BL = 1 / two_level(importance_BL, reasoning_BL, tau, beta).double()
    return torch.where(reasoning_BL, relative(inverse_BL, reasoning_BL), 1.0).float()
