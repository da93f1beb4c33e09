"""Gates and an importance that were tried and are not in the package; README.md says how they did.

`python -m benchmarks learning` trains with one: `--gate python:benchmarks.candidates.learning:ranked --tau 0.4`, or
`--methods python:benchmarks.candidates.learning:FisherUndecided`.
"""

import torch
from scipy import stats
from torch import Tensor

from oar_plugin.credit.gate import bi_level, sorted_rows
from oar_plugin.credit.importance import Backward, Parts
from oar_plugin.credit.importance.fisher import Fisher
from oar_plugin.credit.importance.onward import SURE, to_highest

WINSOR = 0.95
"""Of `winsorised`: quantile at which scores are cut."""


def ranked(importance_BL: Tensor, reasoning_BL: Tensor, tau: float, beta: float, floor: float) -> Tensor:
    """The bi-level gate on ranks: how much larger one score is than the next does not matter. Ties share their mean rank."""
    score_BL = importance_BL.double().masked_fill(~reasoning_BL, torch.nan)
    rank_BL = torch.from_numpy(stats.rankdata(score_BL.numpy(), axis=-1, nan_policy="omit")) - 1
    last_B1 = (reasoning_BL.sum(-1, keepdim=True) - 1).clamp_min(1)
    # The gate takes log1p of what it gets.
    return bi_level(torch.expm1(rank_BL / last_B1), reasoning_BL, tau, beta, floor)


def winsorised(importance_BL: Tensor, reasoning_BL: Tensor, tau: float, beta: float, floor: float) -> Tensor:
    """The bi-level gate behind a cut: no score counts for more than the response's `WINSOR` quantile."""
    high_B1 = importance_BL.masked_fill(~reasoning_BL, torch.nan).nanquantile(WINSOR, dim=-1, keepdim=True)
    return bi_level(importance_BL.minimum(high_B1.nan_to_num(0.0)), reasoning_BL, tau, beta, floor)


def bounded(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float, beta: float, floor: float, largest: float = 2.0
) -> Tensor:
    """The bi-level gate with no weight above `largest` (above 1); what is cut off goes to the others in proportion.

    With `w` the gate's weights, `min(c w, largest)` with one `c >= 1` a response, so that its mean stays 1 and the order of its
    tokens is kept. Without a bound the Fisher norm's weights go up to about 3.6.
    """
    weight_BL = bi_level(importance_BL, reasoning_BL, tau, beta, floor)
    ranked_BL = sorted_rows(weight_BL.double().masked_fill(~reasoning_BL, 0.0)).flip(-1)
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    # With the k largest at the bound, the rest is stretched to what is left of the mass; the smallest k that fits is right.
    cut_L = torch.arange(weight_BL.shape[-1])
    rest_BL = ranked_BL.flip(-1).cumsum(-1).flip(-1)
    stretch_BL = (count_B1 - cut_L * largest) / rest_BL.clamp_min(torch.finfo(torch.float64).tiny)
    fits_BL = stretch_BL * ranked_BL <= largest * (1 + 1e-12)
    stretch_B1 = stretch_BL.gather(-1, fits_BL.int().argmax(-1, keepdim=True)).clamp_min(1.0)
    return torch.where(reasoning_BL, (weight_BL * stretch_B1).clamp_max(largest), weight_BL).float()


class FisherUndecided(Fisher):
    name = "FisherUndecided"
    help = "The answer's part of onward alone, as a share of its response's highest, times uncertainty."
    backwards = (Backward("answer"),)
    reads = frozenset({"entropy"})
    arbitrary_scale = False

    def combine(self, parts: Parts) -> Tensor:
        highest_BL = to_highest(parts.score_KBL[0], parts.reasoning_BL)
        return -torch.expm1(-parts.entropy_BL / SURE) * highest_BL
