"""Gates that were tried in place of the paper's; README.md says how they did.

`python -m benchmarks learning --gate python:benchmarks.candidates.learning.gates:NAME --tau 0.4` trains with one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.credit.gate import bi_level, sorted_rows

LARGEST = 2.0
"""Of `bounded`: largest weight of a token; without it the Fisher norm's goes up to about 3.6."""
WINSOR = 0.95
"""Of `winsorised`: quantile at which scores are cut."""


def ranked(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The bi-level gate on ranks: how much larger one score is than the next does not matter. Ties share their mean rank."""
    score_BL = importance_BL.masked_fill(~reasoning_BL, torch.inf)
    ascending_BL = score_BL.sort(-1).values
    below_BL, at_most_BL = (torch.searchsorted(ascending_BL, score_BL, right=right) for right in (False, True))
    rank_BL = (below_BL + at_most_BL - 1) / 2
    # The gate takes log1p of what it gets.
    last_B1 = (reasoning_BL.sum(-1, keepdim=True) - 1).clamp_min(1)
    return bi_level(
        torch.expm1(rank_BL.double() / last_B1).masked_fill(~reasoning_BL, 0.0), reasoning_BL, tau, beta, floor
    )


def winsorised(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The bi-level gate behind a cut: no score counts for more than the response's `WINSOR` quantile."""
    high_B1 = importance_BL.masked_fill(~reasoning_BL, torch.nan).nanquantile(WINSOR, dim=-1, keepdim=True)
    return bi_level(importance_BL.minimum(high_B1.nan_to_num(0.0)), reasoning_BL, tau, beta, floor)


def bounded(
    importance_BL: Tensor,
    reasoning_BL: Tensor,
    tau: float = 0.4,
    beta: float = 2.0,
    floor: float = 0.1,
    largest: float = LARGEST,
) -> Tensor:
    """The bi-level gate with no weight above `largest` (above 1); what is cut off goes to the others in proportion.

    With `w` the gate's weights, `min(c w, largest)` with one `c >= 1` a response, so that its mean stays 1 and the order of its
    tokens is kept.
    """
    weight_BL = bi_level(importance_BL, reasoning_BL, tau, beta, floor)
    ranked_BL = sorted_rows(weight_BL.double().masked_fill(~reasoning_BL, 0.0)).flip(-1)
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    # With the k largest at the bound, the rest is stretched to what is left of the mass; the smallest k that fits is right.
    cut_L = torch.arange(weight_BL.shape[-1], device=weight_BL.device)
    rest_BL = ranked_BL.flip(-1).cumsum(-1).flip(-1)
    stretch_BL = (count_B1 - cut_L * largest) / rest_BL.clamp_min(torch.finfo(torch.float64).tiny)
    fits_BL = stretch_BL * ranked_BL <= largest * (1 + 1e-12)
    stretch_B1 = stretch_BL.gather(-1, fits_BL.int().argmax(-1, keepdim=True)).clamp_min(1.0)
    return torch.where(reasoning_BL, (weight_BL * stretch_B1).clamp_max(largest), weight_BL).float()


def proportional(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """No quantile: `floor` plus the importance as a share of its mean, cut at `1 + beta`. `tau` means nothing."""
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    kept_BL = importance_BL.double().clamp_min(0.0).masked_fill(~reasoning_BL, 0.0)
    mean_B1 = kept_BL.sum(-1, keepdim=True) / count_B1.clamp_min(1)
    tiny = torch.finfo(torch.float64).tiny
    weight_BL = floor + (kept_BL / mean_B1.clamp_min(tiny)).clamp_max(1 + beta)
    mass_B1 = weight_BL.masked_fill(~reasoning_BL, 0.0).sum(-1, keepdim=True).clamp_min(tiny)
    return torch.where(reasoning_BL, weight_BL * count_B1 / mass_B1, 1.0).float()
