"""Published token credit that costs no pass: weights from hidden states and probabilities of a batch, for the small trainer.

Each returns weights `[B, L]`, 1 outside the reasoning, and says its source and what differs. Shape suffixes as in
`benchmarks.learning.training`, whose `Rollout` it reads; `hidden_BLH` are the last hidden states, `log_prob_BL` the tokens'
log-probs, `done` the share of the training's steps that are over.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from oar_plugin.credit.gate import relative

Weigh: TypeAlias = Callable[[Any, Tensor, Tensor, float], Tensor]


def a3po(rollout: Any, hidden_BLH: Tensor, log_prob_BL: Tensor, done: float) -> Tensor:
    """A3PO (arXiv 2512.21625): the least likely fifth of tokens in right responses and the most likely fifth in wrong ones
    weigh 2, which falls to 1 over the training.

    What differs: no weights of whole responses; "wrong" is below the group's mean.
    """
    keep_BL = rollout.reasoning_BL
    key_BL = torch.where(rollout.negative_B1, log_prob_BL, -log_prob_BL).masked_fill(~keep_BL, -torch.inf)
    rank_BL = key_BL.argsort(-1, descending=True).argsort(-1)
    chosen_BL = (rank_BL < (0.2 * keep_BL.sum(-1, keepdim=True)).round()) & keep_BL
    return torch.where(chosen_BL, 2.0 - done, 1.0)


def delta(rollout: Any, hidden_BLH: Tensor, log_prob_BL: Tensor, done: float) -> Tensor:
    """DelTA (arXiv 2605.21467): tokens that are nearer to the centroid of their own side weigh more.

    A token's vector is `(1 - p) h` of the state that it was drawn from, which stands for its gradient at the last layer;
    centroids are weighted by the size of the advantage. What differs: weights from 0.2 to 1.8, about the range of the
    package's gate, not from 0.8 to 1.2; one round of centroids, over the batch; each response keeps its total.
    """
    keep_BL, size_B1 = rollout.reasoning_BL, rollout.advantage_B.abs()[:, None]
    vector_BLH = -torch.expm1(log_prob_BL)[..., None] * F.pad(hidden_BLH[:, :-1], (0, 0, 1, 0))
    sides = [keep_BL & ~rollout.negative_B1, keep_BL & rollout.negative_B1]
    if not all(side_BL.any() for side_BL in sides):
        return torch.ones_like(log_prob_BL)
    weighted = [(size_B1 * side_BL)[..., None] for side_BL in sides]
    centroids = [(vector_BLH * w_BL1).sum((0, 1)) / w_BL1.sum() for w_BL1 in weighted]
    right_BL, wrong_BL = ((vector_BLH - centroid_H).square().sum(-1) for centroid_H in centroids)
    margin_BL = torch.where(rollout.negative_B1, right_BL - wrong_BL, wrong_BL - right_BL)
    scaled_BL = 0.2 + 1.6 * torch.sigmoid(margin_BL / margin_BL[keep_BL].std().clamp_min(1e-9))
    return torch.where(keep_BL, relative(scaled_BL, keep_BL), 1.0)


def thr(rollout: Any, hidden_BLH: Tensor, log_prob_BL: Tensor, done: float) -> Tensor:
    """Token hidden reward (arXiv 2505.18830, 2510.03669): in wrong responses, tokens that push right ones down weigh half.

    A token's influence is the sum over the tokens of right responses of `a <h, h'>`, where `a` compares what both predicted:
    here `(1 - p) (1 - p')` for the same token, and 0 for others. What differs: `a` leaves out the rest of the distribution, the
    threshold is the mean over the wrong responses' tokens, the batch is one group.
    """
    keep_BL, negative_B1 = rollout.reasoning_BL, rollout.negative_B1
    state_BLH, doubt_BL = F.pad(hidden_BLH[:, :-1], (0, 0, 1, 0)), -torch.expm1(log_prob_BL)
    right_BL, wrong_BL = keep_BL & ~negative_B1, keep_BL & negative_B1
    if not (right_BL.any() and wrong_BL.any()):
        return torch.ones_like(log_prob_BL)
    vector_BLH = doubt_BL[..., None] * state_BLH
    tokens = rollout.token_BL
    sums_VH = torch.zeros(int(tokens.max()) + 1, state_BLH.shape[-1])
    sums_VH.index_add_(0, tokens[right_BL], vector_BLH[right_BL])
    influence_BL = (vector_BLH * sums_VH[tokens]).sum(-1)
    chosen_BL = wrong_BL & (influence_BL > influence_BL[wrong_BL].mean())
    return torch.where(chosen_BL, 0.5, 1.0)


def shear(rollout: Any, hidden_BLH: Tensor, log_prob_BL: Tensor, done: float, span: int = 8, lines: int = 16) -> Tensor:
    """SHEAR (arXiv 2604.23318): a span weighs by how far its hidden states are from those of the other outcome's spans.

    The distance is the Wasserstein distance of two spans, the smallest over the spans of responses with the other outcome. What
    differs: sliced over 16 random lines; spans of 8 tokens without overlap; the batch is one group; a response keeps its total.
    """
    keep_BL, found_BL = rollout.reasoning_BL, torch.zeros_like(log_prob_BL)
    line_HP = F.normalize(torch.randn(hidden_BLH.shape[-1], lines, generator=torch.Generator().manual_seed(0)), dim=0)
    spans: list[tuple[int, Tensor, Tensor]] = []
    for row in range(len(keep_BL)):
        for at_n in filter(len, keep_BL[row].nonzero()[:, 0].split(span)):
            sorted_nP = (hidden_BLH[row, at_n] @ line_HP).sort(0).values
            # Quantiles, so that a short last span has as many.
            at_q = torch.linspace(0, len(at_n) - 1, span).round().long()
            spans.append((row, at_n, sorted_nP[at_q].flatten()))
    quantile_SQ = torch.stack([quantile_Q for *_, quantile_Q in spans])
    negative_S = rollout.negative_B1[[row for row, *_ in spans], 0]
    distance_SS = torch.cdist(quantile_SQ, quantile_SQ, p=1) / quantile_SQ.shape[1]
    nearest_S = distance_SS.masked_fill(negative_S[:, None] == negative_S[None], torch.inf).amin(1)
    if not nearest_S.isfinite().all():
        return torch.ones_like(log_prob_BL)
    for (row, at_n, _), distance in zip(spans, nearest_S.tolist(), strict=True):
        found_BL[row, at_n] = distance
    return torch.where(keep_BL, relative(found_BL, keep_BL), 1.0)


RIVALS: dict[str, Weigh] = {one.__name__: one for one in (a3po, delta, thr, shear)}
