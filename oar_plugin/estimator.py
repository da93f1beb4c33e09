"""OAR as an estimator: a group-relative advantage times the gate's weights, with the fallbacks decided and counted."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import MEASURE_NAMES, Status, measured, summarize
from oar_plugin.credit.gate import kept_total, relative
from oar_plugin.credit.importance import Importance
from oar_plugin.output import warn_once
from oar_plugin.passes.request import IMPORTANCE, MEASURES, SEGMENTS, STATUS, WEIGHTS

ROUNDING = 2 * torch.finfo(torch.float32).eps  # of the largest reward of a group, times its number of responses


def needs_credit(advantage_BL: Tensor, reward_BP: Tensor | None = None, groups: Sequence[Hashable] = ()) -> Tensor:
    """Which responses need credit, bool `[B]`: their advantage is finite, and not zero at every token.

    With rewards, a group of several responses with equal rewards needs none: its advantage is only rounding, which a division
    by the standard deviation enlarges up to 1. Pass no rewards if the host normalises over responses of several groups.
    `reward_BP` has the parts of each reward, such as those of its tokens; P may be 1.
    """
    least_B, most_B = advantage_BL.aminmax(dim=-1)  # one pass: a driver does this for all ranks
    needed_B = least_B.isfinite() & most_B.isfinite() & ((least_B != 0) | (most_B != 0))
    if reward_BP is None:
        return needed_B
    part_BP = reward_BP.cpu().double()
    reward_B, size_B = part_BP.sum(-1), part_BP.abs().sum(-1)
    members = defaultdict[Hashable, list[int]](list)
    for row in reward_B.isfinite().nonzero()[:, 0].tolist():
        members[groups[row]].append(row)
    for rows in (rows for rows in members.values() if len(rows) > 1):
        least, most = reward_B[rows].aminmax()
        if most - least <= ROUNDING * size_B[rows].max() * len(rows):
            needed_B[rows] = False
    return needed_B


class Reshaped(NamedTuple):
    advantage_BL: Tensor
    weight_BL: Tensor  # 1 at all tokens of a response that falls back to GRPO
    status_B: Tensor  # int64, a `Status` per response
    measure_BM: Tensor  # float32, `MEASURE_NAMES` of each response; if importance is predicted also `PREDICTION_NAMES`

    @property
    def metrics(self) -> dict[str, float]:
        """By name, without the prefix `oar/`."""
        return summarize(self.measure_BM, self.status_B)


def reshape(
    advantage_BL: Tensor,
    importance_BL: Tensor,
    reasoning_BL: Tensor,
    status_B: Tensor,
    config: OarConfig,
    prediction_3: Tensor | None = None,
) -> Reshaped:
    """Multiplies the host's advantages `[B, L]` with the gate's weights. For the other arguments see `weigh`. Raises nothing: a
    response that cannot be weighted keeps its advantages, and its status says why.
    """
    given = importance_BL, reasoning_BL, rewarded(status_B, advantage_BL), config
    weight_BL, status_B, measure_BM = weigh(*given, prediction_3=prediction_3)
    return Reshaped(weighted(advantage_BL, weight_BL), weight_BL, status_B, measure_BM)


def weighted(advantage: Tensor, weight: Tensor) -> Tensor:
    """Advantages times weights, of one shape. An advantage that is NaN or infinite stays: its reward is bad (`rewarded`)."""
    return torch.where(advantage.isfinite(), advantage * weight, advantage)


def rewarded(status_B: Tensor, advantage_BL: Tensor) -> Tensor:
    """Returns the statuses, with BAD_REWARD for a response with a NaN or infinite advantage: no weight can mend it."""
    return status_B.masked_fill(~advantage_BL.sum(-1).isfinite(), int(Status.BAD_REWARD))


def weigh(
    importance_BL: Tensor,
    reasoning_BL: Tensor,
    status_B: Tensor,
    config: OarConfig,
    kind: Importance | None = None,
    prediction_3: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gate's weights, float32 `[B, L]`, the final `Status`, int64 `[B]`, and `Reshaped.measure_BM`.

    `reasoning_BL` is bool, `status_B` (int64) the `Status` before the gate, `prediction_3` the last three of `PREDICTION_NAMES`
    if importance is predicted, `kind` the importance if it is not that of the settings. Bad data raises nothing: the weights of
    a response whose importance or weights cannot be used are 1, and its status says why. Padding on the right changes nothing.
    """
    finite_B = torch.isfinite(importance_BL.masked_fill(~reasoning_BL, 0.0)).all(-1)
    status_B = status_B.masked_fill((status_B == Status.SCORED) & ~finite_B, Status.NON_FINITE)
    low_B = importance_BL.masked_fill(~reasoning_BL, torch.inf).amin(-1)
    high_B = importance_BL.masked_fill(~reasoning_BL, -torch.inf).amax(-1)
    status_B = status_B.masked_fill((status_B == Status.SCORED) & ~(high_B > low_B), Status.CONSTANT)
    if prediction_3 is not None:  # predictions are 0 until enough labels were seen
        status_B = status_B.masked_fill((status_B == Status.CONSTANT) & (high_B == 0), Status.LEARNING)

    kind = kind or config.importance_object
    usable_BL = reasoning_BL & (status_B == Status.SCORED)[:, None]
    gate = config.gate_object
    if kind.arbitrary_scale and not gate.order_only:
        importance_BL = relative(importance_BL, usable_BL)
    # A response on which a user's gate or importance fails must not spoil the batch. An actor that raised would leave the other
    # ranks waiting for it.
    try:
        weight_BL = gate.weights(importance_BL, usable_BL, config.quantile, config.beta, config.floor).float()
        kept_B = kept_total(weight_BL, usable_BL)
    except Exception:
        text = "algorithm.oar.gate=%s raised; the responses of its batch fall back to GRPO"
        warn_once(text, config.gate, exc_info=True)
        weight_BL, kept_B = torch.ones_like(importance_BL), torch.zeros_like(finite_B)
    status_B = status_B.masked_fill((status_B == Status.SCORED) & ~kept_B, Status.NON_FINITE)
    scored_B1 = (status_B == Status.SCORED)[:, None]
    weight_BL = torch.where(reasoning_BL & scored_B1, weight_BL, 1.0)
    measure_BM = measured(weight_BL, reasoning_BL & scored_B1)
    if prediction_3 is not None:  # every scored response is predicted
        measure_BM = torch.cat([measure_BM, scored_B1, prediction_3.to(measure_BM).expand(len(status_B), 3)], -1)
    return weight_BL, status_B, measure_BM


def weigh_rows(
    importance: Sequence[Tensor],
    segments: Sequence[Tensor],
    status_B: Tensor,
    config: OarConfig,
    kind: Importance | None = None,
    prediction_3: Tensor | None = None,
) -> dict[str, list[Tensor]]:
    """`weigh` for responses of different lengths, `[L_i]` each. A segment is a `Segment`.

    Returns the fields of an actor's answer (`passes.request`), without `SECONDS`: one tensor per response.
    """
    weights, status_B = [torch.ones(len(row)) for row in importance], status_B.clone()
    measure_BM = torch.zeros(len(weights), len(MEASURE_NAMES))
    if prediction_3 is not None:
        measure_BM = torch.cat([measure_BM, measure_BM[:, :1], prediction_3.expand(len(weights), 3)], -1)
    scored = (status_B == Status.SCORED).nonzero()[:, 0].tolist()
    if scored:  # others may have no tokens
        importance_SL, segments_SL = (pad_sequence([rows[i] for i in scored], True) for rows in (importance, segments))
        given = importance_SL, segments_SL == Segment.REASONING, status_B[scored], config, kind, prediction_3
        weight_SL, status_B[scored], measure_BM[scored] = weigh(*given)
        for row, weight_L in zip(scored, weight_SL, strict=True):
            weights[row] = weight_L[: len(weights[row])]
    rows = {IMPORTANCE: list(importance), SEGMENTS: list(segments), WEIGHTS: weights}
    return rows | {STATUS: list(status_B[:, None]), MEASURES: list(measure_BM)}
