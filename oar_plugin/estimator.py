"""OAR as an estimator: a group-relative advantage times the gate's weights, with the fallbacks decided and counted."""

from typing import NamedTuple

import torch
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.credit.gate import kept_total, relative


class Reshaped(NamedTuple):
    """What `reshape` returns."""

    advantage_BL: Tensor
    weight_BL: Tensor
    status_B: Tensor
    metrics: dict[str, float]


def reshape(
    advantage_BL: Tensor, importance_BL: Tensor, reasoning_BL: Tensor, status_B: Tensor, config: OarConfig
) -> Reshaped:
    """Reshape a batch of advantages.

    Args:
        advantage_BL: the host's advantages, `[B, L]`.
        importance_BL: `[B, L]`, finite at the reasoning tokens of scored responses.
        reasoning_BL: bool `[B, L]`.
        status_B: int64 `[B]` of `Status` as the actor reported it.
        config: which gate, its tau, beta and floor, and whether the importance's scale is arbitrary.

    Returns:
        Advantages, weights (1 wherever a response fell back), the final status, and metrics without prefix. Nothing
        raises for bad data: a response that cannot be used keeps its advantage, and its reason is counted.
    """
    scored_B = status_B == Status.SCORED
    finite_B = torch.isfinite(importance_BL.masked_fill(~reasoning_BL, 0.0)).all(-1)
    status_B = status_B.masked_fill(scored_B & ~finite_B, Status.NON_FINITE)
    low_B = importance_BL.masked_fill(~reasoning_BL, torch.inf).amin(-1)
    high_B = importance_BL.masked_fill(~reasoning_BL, -torch.inf).amax(-1)
    status_B = status_B.masked_fill((status_B == Status.SCORED) & ~(high_B > low_B), Status.CONSTANT)

    usable_BL = reasoning_BL & (status_B == Status.SCORED)[:, None]
    gate = config.gate_object
    if config.importance_object.arbitrary_scale and not gate.order_only:
        importance_BL = relative(importance_BL, usable_BL)
    weight_BL = gate.weights(importance_BL, usable_BL, config.quantile, config.beta, config.floor).float()
    # One response that a user's gate or importance was not made for must not spoil a batch.
    bad_B = (status_B == Status.SCORED) & ~kept_total(weight_BL, usable_BL)
    status_B = status_B.masked_fill(bad_B, Status.NON_FINITE)
    usable_BL = reasoning_BL & (status_B == Status.SCORED)[:, None]
    weight_BL = torch.where(usable_BL, weight_BL, 1.0)
    return Reshaped(advantage_BL * weight_BL, weight_BL, status_B, summarize(weight_BL, usable_BL, status_B))
