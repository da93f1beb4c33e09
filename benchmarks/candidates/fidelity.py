"""Estimates of exact OAR-P at the cost of one backward that the package does not have: `fidelity --also` judges them."""

from torch import Tensor

from oar_plugin.credit.importance import Backward
from oar_plugin.credit.importance.base import saliency, squared_norm
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.credit.importance.oar_g import OarG


class OarGNorm(OarG):
    help = "oar_g with the gradient's norm in place of its product with the embedding."

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient).sqrt()


class FisherProduct(Fisher):
    help = "fisher along the embedding alone: how far the answer moves if it becomes 0."

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return saliency(gradient, embedding).square()


class FisherRelative(Fisher):
    help = "fisher times the embedding's squared norm: a move by the embedding's own length, in a random direction."

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient) * squared_norm(embedding)


class FisherRows(Fisher):
    help = "fisher of each row of the answer, with signs of its own, in place of their mean."
    backwards = (Backward("answer"),)
