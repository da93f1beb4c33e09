"""Random numbers in (0, 1), the same on every layout and new in every step: the control for the effect of a gate alone."""

from torch import Tensor

from oar_plugin.credit.importance.base import Importance, Parts
from oar_plugin.credit.noise import uniform


class Random(Importance):
    name = "random"
    help = "Random numbers: the control for whether an importance says anything."
    arbitrary_scale = False

    def combine(self, parts: Parts) -> Tensor:
        return uniform(parts.seed_BL.flatten(), 1).view(parts.seed_BL.shape)
