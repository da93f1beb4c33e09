"""Gates: from importance to weights that keep each response's total.

`gate` is the paper's bi-level gate (arXiv 2601.07408, reshaping). Per response, over its `R` reasoning tokens:
1. `s = log1p(I)`, min-max to [0, 1]; a constant response becomes all zeros;
2. `q` = the tau-quantile of `s`, with linear interpolation. tau is a quantile and stays the same for every response (the
   published code overwrites it sample by sample);
3. `s < q`: `w = max(s / q, floor)`; `s >= q`: `w = 1 + beta (s - q) / (1 - q)`;
4. `w <- w R / sum(w)`: the mass is kept.

`two_level` keeps steps 2 and 4 and has two weights; `bounded` limits the largest weight of either.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gate(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """Weights for a batch of responses.

    Args:
        importance_BL: `[B, L]`, finite and above -1 where `reasoning_BL` is true; ignored elsewhere.
        reasoning_BL: bool `[B, L]`, the tokens to reshape.
        tau: quantile in [0, 1]; 0.3-0.7 was the stable range in the paper.
        beta: boost of the tokens above the quantile, >= 0.
        floor: smallest weight (before the mass is restored) of the tokens below it, in (0, 1].

    Returns:
        float32 `[B, L]`: weights that average 1 over each response's reasoning tokens, 1 at every other token. A response
        without reasoning tokens is all ones.
    """
    outside_BL = ~reasoning_BL
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    last_B1 = (count_B1 - 1).clamp_min(0)
    place_B2, share_B1 = _quantile_places(count_B1, tau)
    place_B4 = torch.cat([torch.zeros_like(last_B1), place_B2, last_B1], -1)
    # Sorted as they come: the logarithm keeps their order, and four of them are all that is needed.
    picked_B4 = sorted_rows(importance_BL.masked_fill(outside_BL, torch.inf)).gather(-1, place_B4).double().log1p()
    low_B1, high_B1 = picked_B4[:, :1], picked_B4[:, 3:]
    flat_B1 = ~(high_B1 > low_B1)
    low_B1 = low_B1.masked_fill(flat_B1, 0.0)
    span_B1 = torch.where(flat_B1, torch.inf, high_B1 - low_B1)
    below_B1, above_B1 = ((picked_B4[:, 1:3] - low_B1) / span_B1).chunk(2, -1)
    quantile_B1 = torch.lerp(below_B1, above_B1, share_B1)

    # float64: q and 1 - q are differences of scores that agree to many digits when a response is nearly flat.
    score_BL = importance_BL.masked_fill(outside_BL, 0.0).double().log1p_().sub_(low_B1).div_(span_B1)
    tiny = torch.finfo(torch.float64).tiny
    weight_BL = torch.where(
        score_BL < quantile_B1,
        (score_BL / quantile_B1.clamp_min(tiny)).clamp_min_(floor),
        (score_BL - quantile_B1).mul_(beta).div_((1 - quantile_B1).clamp_min(tiny)).add_(1.0),
    )
    mass_B1 = weight_BL.masked_fill_(outside_BL, 0.0).sum(-1, keepdim=True).clamp_min(tiny)
    return weight_BL.mul_(count_B1 / mass_B1).masked_fill_(outside_BL, 1.0).float()


def two_level(importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0) -> Tensor:
    """Weights that say which tokens matter, and not how much: `1 + beta` at and above the tau-quantile, 1 below.

    Not in the paper. No outlier can take the scale with it, and differences between small scores, which are mostly noise, do
    nothing.

    Args:
        importance_BL: `[B, L]`, finite where `reasoning_BL` is true; ignored elsewhere. Only its order counts.
        reasoning_BL: bool `[B, L]`, the tokens to reshape.
        tau: quantile in [0, 1].
        beta: boost of the tokens at and above it, >= 0.

    Returns:
        float32 `[B, L]`, as `gate` returns it.
    """
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    place_B2, share_B1 = _quantile_places(count_B1, tau)
    ranked_BL = sorted_rows(importance_BL.double().masked_fill(~reasoning_BL, torch.inf))
    below_B1, above_B1 = ranked_BL.gather(-1, place_B2).chunk(2, -1)
    quantile_B1 = torch.lerp(below_B1, above_B1, share_B1)
    above_BL = (importance_BL.double() >= quantile_B1) & reasoning_BL
    weight_BL = 1 + beta * above_BL.double()
    mass_B1 = (count_B1 + beta * above_BL.sum(-1, keepdim=True)).clamp_min(1)
    return torch.where(reasoning_BL, weight_BL * count_B1 / mass_B1, 1.0).float()


def bounded(weight_BL: Tensor, reasoning_BL: Tensor, max_weight: float) -> Tensor:
    """The same weights with none above `max_weight`; what is cut off goes to the others in proportion.

    Args:
        weight_BL: `[B, L]` from `gate`: positive, with a mean of 1 over each response's reasoning tokens.
        reasoning_BL: bool `[B, L]`, the tokens that take part.
        max_weight: above 1; as the mean stays 1, a bound of 1 would leave nothing to reshape.

    Returns:
        float32 `[B, L]`, `min(c w, max_weight)` with one `c >= 1` a response, so that its mean stays 1 and the order of its
        tokens is kept; a response without a weight above the bound stays as it is.
    """
    ranked_BL = sorted_rows(weight_BL.double().masked_fill(~reasoning_BL, 0.0)).flip(-1)
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    # With the k largest at the bound, the rest is stretched to what is left of the mass; the smallest k that fits is right.
    cut_L = torch.arange(weight_BL.shape[-1], device=weight_BL.device)
    rest_BL = ranked_BL.flip(-1).cumsum(-1).flip(-1)
    stretch_BL = (count_B1 - cut_L * max_weight) / rest_BL.clamp_min(torch.finfo(torch.float64).tiny)
    fits_BL = stretch_BL * ranked_BL <= max_weight * (1 + 1e-12)
    stretch_B1 = stretch_BL.gather(-1, fits_BL.int().argmax(-1, keepdim=True)).clamp_min(1.0)
    return torch.where(reasoning_BL, (weight_BL * stretch_B1).clamp_max(max_weight), weight_BL).float()


def _quantile_places(count_B1: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Between which two of `count` ascending values their tau-quantile lies, int64 `[B, 2]`, and how far, `[B, 1]`."""
    last_B1 = (count_B1 - 1).clamp_min(0)
    rank_B1 = tau * last_B1.double()
    lower_B1 = rank_B1.floor().long()
    return torch.cat([lower_B1, torch.minimum(lower_B1 + 1, last_B1)], -1), rank_B1 - lower_B1


def sorted_rows(values_BL: Tensor) -> Tensor:
    """`values_BL`, which may be overwritten, with each row in ascending order."""
    if values_BL.device.type != "cpu":
        return values_BL.sort(-1).values
    values_BL.numpy().sort(-1)  # numpy's sort uses vector instructions: up to 50 times as fast as torch's here
    return values_BL
