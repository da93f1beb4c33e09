"""OAR as an estimator: a group-relative advantage times the gate's weights, with the fallbacks decided and counted."""

from typing import NamedTuple

import torch
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.credit.gate import kept_total, relative


class Reshaped(NamedTuple):
    advantage_BL: Tensor
    weight_BL: Tensor  # 1 at all tokens of a response that falls back to GRPO
    status_B: Tensor  # int64, a `Status` per response
    metrics: dict[str, float]  # by name, without the prefix `oar/`


def reshape(
    advantage_BL: Tensor, importance_BL: Tensor, reasoning_BL: Tensor, status_B: Tensor, config: OarConfig
) -> Reshaped:
    """Multiplies the host's advantages with the gate's weights.

    `reasoning_BL` is bool, `status_B` (int64) the `Status` from the actor. Bad data raises nothing: a response whose importance
    or weights cannot be used keeps its advantages, and the reason is counted.
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
    # A response on which a user's gate or importance fails must not spoil the batch.
    bad_B = (status_B == Status.SCORED) & ~kept_total(weight_BL, usable_BL)
    status_B = status_B.masked_fill(bad_B, Status.NON_FINITE)
    usable_BL = reasoning_BL & (status_B == Status.SCORED)[:, None]
    weight_BL = torch.where(usable_BL, weight_BL, 1.0)
    return Reshaped(advantage_BL * weight_BL, weight_BL, status_B, summarize(weight_BL, usable_BL, status_B))
