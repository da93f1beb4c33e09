"""Credit that looks at a token's alternatives, or knows the right answer: what can be marked, whatever it costs.

With `g_t` the gradient of some scalar with respect to the embedding of token `t`, and `v` a token that the policy could have
drawn there:

    signed      <g_t, e_t - mean_v e_v>    what the token did to the scalar, beside what the policy does there on average
    variance    Var_v <g_t, e_v>           how far the policy's own alternatives at that place move the scalar

The scalar is the *margin*, or the *gold contrast*, which knows the right answer. A *sweep* reaches results that the answer does
not see, the later steps being teacher-forced: the policy's next token is worth what writing it is worth, `<g_t, e_v>`, and each
backward also starts from that, one more decision back.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.learning.training import Forward, Rollout
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance.base import squared_norm
from oar_plugin.credit.importance.decision import margin_coefficients


class Sight:
    """A micro-batch and its graph, as these scores look at it; row `r` of logits predicts token `r + 1`."""

    def __init__(self, one: Forward, rollout: Rollout) -> None:
        segments_bL = rollout.segments_BL[one.rows, : one.token_bL.shape[1]]
        self.embedding_bLH, self.reasoning_bL = one.embedding_bLH, segments_bL == Segment.REASONING
        self._answer_rows_bL = F.pad(segments_bL[:, 1:] == Segment.ANSWER, (0, 1))
        self._logits_bLV = F.linear(one.hidden_bLH, one.head_VH.detach())
        self._detached_bLV = self._logits_bLV.detach()
        self._next_bL, self._gold_bm = F.pad(one.token_bL[:, 1:], (0, 1)), rollout.gold_Bm[one.rows]
        self._negative_b11 = rollout.negative_B1[one.rows, :, None]
        self.table_VH = one.model.get_input_embeddings().weight.detach()
        # Of each token the distribution that it was drawn from; zeros for the first.
        self.policy_bLV = F.pad(self._detached_bLV[:, :-1].softmax(-1), (0, 0, 1, 0))

    def gradient(self, coefficient_bLV: Tensor) -> Tensor:
        """Of `sum(coefficients * logits)`, `[b, L, H]`."""
        (found,) = torch.autograd.grad(
            (coefficient_bLV * self._logits_bLV).sum(), self.embedding_bLH, retain_graph=True
        )
        return found

    def margin(self) -> Tensor:
        """Coefficients of the answer's highest logits less the next, `[b, L, V]`."""
        return margin_coefficients(self._detached_bLV) * self._answer_rows_bL[..., None]

    def gold_contrast(self) -> Tensor:
        """Of the answer's own logits less the right answer's; where it is right, less the policy's mean over the others."""
        columns = self._detached_bLV.shape[-1]
        place_bL = (self._answer_rows_bL.long().cumsum(-1) - 1).clamp(0, self._gold_bm.shape[1] - 1)
        own_bLV = F.one_hot(self._next_bL, columns).float()
        gold_bLV = F.one_hot(self._gold_bm.gather(1, place_bL), columns).float()
        others_bLV = self._detached_bLV.masked_fill(own_bLV > 0, -torch.inf).softmax(-1)
        rival_bLV = torch.where(self._negative_b11, gold_bLV, others_bLV)
        return (own_bLV - rival_bLV) * self._answer_rows_bL[..., None]

    def sweep(self, coefficient_bLV: Tensor, backwards: int) -> Tensor:
        """The gradient through the answer, and through the decisions on the way to it, `[b, L, H]`."""
        gradient_bLH = self.gradient(coefficient_bLV)
        for _ in range(backwards - 1):
            centred_bLV = self.policy_bLV * self._centred(gradient_bLH) * self.reasoning_bL[..., None]
            gradient_bLH = self.gradient(coefficient_bLV + F.pad(centred_bLV[:, 1:], (0, 0, 0, 1)))
        return gradient_bLH

    def signed(self, gradient_bLH: Tensor) -> Tensor:
        mean_bLH = self.policy_bLV @ self.table_VH
        return (gradient_bLH * (self.embedding_bLH.detach() - mean_bLH)).sum(-1)

    def variance(self, gradient_bLH: Tensor) -> Tensor:
        return (self.policy_bLV * self._centred(gradient_bLH).square()).sum(-1)

    def _centred(self, gradient_bLH: Tensor) -> Tensor:
        """What writing each token would be worth, beside the policy's mean, `[b, L, V]`."""
        worth_bLV = gradient_bLH @ self.table_VH.T
        return worth_bLV - (self.policy_bLV * worth_bLV).sum(-1, keepdim=True)


def _swept(backwards: int, score: Callable[[Sight, Tensor], Tensor]) -> Callable[[Sight], Tensor]:
    return lambda sight: score(sight, sight.sweep(sight.gold_contrast(), backwards))


MARKS: dict[str, Callable[[Sight], Tensor]] = {
    "margin variance": lambda sight: sight.variance(sight.gradient(sight.margin())),
    "gold norm": lambda sight: squared_norm(sight.gradient(sight.gold_contrast())),
    "gold signed": _swept(1, Sight.signed),
    "gold variance": _swept(1, Sight.variance),
    **{f"gold sweep {count} signed": _swept(count, Sight.signed) for count in (2, 4, 8)},
    "gold sweep 8 variance": _swept(8, Sight.variance),
}
"""Scores `[b, L]` by name; those named gold know the right answer, and a sweep says how many backwards it makes."""
