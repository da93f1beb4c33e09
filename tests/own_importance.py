"""The example of docs/your-own-importance.md: an importance and a gate of one's own."""

import torch
from torch import Tensor

from oar_plugin.credit.importance import Backward, Importance, Rows


class Saliency(Importance):
    """Gradient times input of the answer's log-probability."""

    name = "saliency"
    help = "Gradient times input of the answer's log-probability."
    backwards = (Backward("answer"),)

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        """d log p(answer) / d logits = onehot(answer) - p."""
        return -rows.vocabulary.subtract_one_at(rows.vocabulary.softmax(rows.logits_NV), rows.token_N)

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return (gradient.float() * embedding.float()).sum(-1).abs()


def upper_half(importance_BL: Tensor, reasoning_BL: Tensor, beta: float) -> Tensor:
    """Weight 1 + beta for tokens above the response's mean and 1 for the others, scaled to average 1."""
    count_B1 = reasoning_BL.sum(-1, keepdim=True).clamp_min(1)
    mean_B1 = importance_BL.masked_fill(~reasoning_BL, 0.0).sum(-1, keepdim=True) / count_B1
    weight_BL = torch.where(reasoning_BL, 1 + beta * (importance_BL > mean_B1), 0.0)
    return torch.where(reasoning_BL, weight_BL * count_B1 / weight_BL.sum(-1, keepdim=True).clamp_min(1), 1.0)
