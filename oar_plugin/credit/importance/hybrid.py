"""Exact OAR-P (`oar_p`) for the tokens with the largest Fisher norm (`fisher`), a calibrated estimate for the others.

The gradient comes from the log-prob pass, when rollout engines have freed their weights, so the actor runs the copies. They
bring it nearer to exact OAR-P than `fisher` alone is (`benchmarks/results/fidelity_smollm2_cpu.md`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from oar_plugin.credit.importance.base import Copies
from oar_plugin.credit.importance.fisher import Fisher


class Hybrid(Fisher):
    name = "hybrid"
    help = "oar_p for the tokens with the largest fisher score, a calibrated estimate for the others."
    copies = Copies(budget=0.3, by_gradient=True)
    arbitrary_scale = False

    def conflicts(self, settings: Mapping[str, Any]) -> Iterator[str]:
        if settings["perturbation"]["backend"] != "actor":
            yield (
                f"importance={self.name} with perturbation.backend=rollout: the gradient comes from the log-prob pass, when "
                "the rollout engines have already given up weights and cache; allowed: perturbation.backend=actor, or "
                "importance=oar_p"
            )
        if settings["perturbation"]["budget"] == 1:
            yield (
                f"importance={self.name} with perturbation.budget=1: nothing is left for the gradient to choose; allowed: a "
                "budget below 1 or a number of positions, or importance=oar_p"
            )
