"""Gates that were tried in place of `oar_plugin.credit.gate.gate`, with its arguments; README.md says how they did.

`oar bench learning --gate benchmarks.candidates.learning.gates:NAME` trains with one (from the repository's root, with
`PYTHONPATH=.`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.credit import reshape
from oar_plugin.credit.gate import gate

LARGEST = 2.0
"""Of `bounded`: largest weight of a token; without it the Fisher norm's goes up to about 3.6."""
WINSOR = 0.95
"""Of `winsorised`: quantile at which scores are cut."""


def ranked(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The bi-level gate on ranks: how much larger one score is than the next does not matter. Ties share their mean rank."""
    score_BL = importance_BL.masked_fill(~reasoning_BL, torch.inf)
    below_BL = (score_BL[:, None, :] < score_BL[:, :, None]).sum(-1)
    at_most_BL = (score_BL[:, None, :] <= score_BL[:, :, None]).sum(-1)
    rank_BL = (below_BL + at_most_BL - 1) / 2
    # The gate takes log1p of what it gets.
    last_B1 = (reasoning_BL.sum(-1, keepdim=True) - 1).clamp_min(1)
    return gate(torch.expm1(rank_BL.double() / last_B1).masked_fill(~reasoning_BL, 0.0), reasoning_BL, tau, beta, floor)


def winsorised(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The bi-level gate behind a cut: no score counts for more than the response's `WINSOR` quantile."""
    score_BL = importance_BL.double().masked_fill(~reasoning_BL, torch.nan)
    high_B1 = score_BL.nanquantile(WINSOR, dim=-1, keepdim=True).nan_to_num(0.0)
    return gate(torch.minimum(importance_BL.double(), high_B1), reasoning_BL, tau, beta, floor)


def bounded(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The bi-level gate with `algorithm.oar.max_weight=LARGEST`."""
    return reshape.bounded(gate(importance_BL, reasoning_BL, tau, beta, floor), reasoning_BL, LARGEST)


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
