"""Estimators of exact OAR-P at the cost of one backward that are not in the package: `fidelity --also` judges them."""

from torch import Tensor

from oar_plugin.credit.importance import Backward
from oar_plugin.credit.importance.base import saliency, squared_norm
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.credit.importance.oar_g import OarG


class OarGNorm(OarG):
    name = "OarGNorm"
    help = "oar_g with the gradient's norm in place of its product with the embedding."

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient).sqrt()


class FisherSaliency(Fisher):
    name = "FisherSaliency"
    help = "fisher with the product of gradient and embedding: how far the answer moves if the embedding becomes 0."

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return saliency(gradient, embedding).square()


class FisherRelative(Fisher):
    name = "FisherRelative"
    help = (
        "fisher times the embedding's squared norm: how far the answer moves if the embedding moves by its own length."
    )
    arbitrary_scale = False

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient) * squared_norm(embedding)


class FisherRows(Fisher):
    name = "FisherRows"
    help = "fisher with signs of its own for each row of the answer, as with the probe answer_joint."
    backwards = (Backward("answer"),)
