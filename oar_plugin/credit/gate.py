"""Gates: from importance to weights that keep each response's total.

`bi_level` is the paper's (arXiv 2601.07408, reshaping). Per response, over its `R` reasoning tokens:
1. `s = log1p(I)`, min-max to [0, 1]; a constant response becomes all zeros;
2. `q` = the tau-quantile of `s`, with linear interpolation. tau is a quantile and stays the same for every response (the
   published code overwrites it sample by sample);
3. `s < q`: `w = max(s / q, floor)`; `s >= q`: `w = 1 + beta (s - q) / (1 - q)`;
4. `w <- w R / sum(w)`: the mass is kept.

The logarithm takes sizes for nats. Scores on an arbitrary scale (`Importance.arbitrary_scale`) are divided by their response's
mean first (`relative`), or the weights would change with the scale of the model's embeddings.

`two_level` keeps steps 2 and 4 and has two weights; only the order of scores counts.

A gate takes `importance_BL`, finite and above -1 where the bool `reasoning_BL` is true and ignored elsewhere, `tau` in [0, 1],
`beta` >= 0 and `floor` in (0, 1]. It returns float32 weights `[B, L]` that average 1 over each response's reasoning tokens and
are 1 elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oar_plugin.credit.named import imported


def bi_level(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The paper's gate; a tau of 0.3 to 0.7 was its stable range."""
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


def two_level(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.85, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """Weights that say which tokens matter, and not how much: `1 + beta` at and above the tau-quantile, 1 below.

    Not in the paper. No outlier can take the scale with it, and differences between small scores, which are mostly noise, do
    nothing. A token at the response's minimum is never boosted: with more than `tau` of the scores there, the quantile is the
    minimum itself, and everything would be above it.

    `floor` means nothing here.
    """
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    place_B2, share_B1 = _quantile_places(count_B1, tau)
    ranked_BL = sorted_rows(importance_BL.double().masked_fill(~reasoning_BL, torch.inf))
    below_B1, above_B1 = ranked_BL.gather(-1, place_B2).chunk(2, -1)
    quantile_B1 = torch.lerp(below_B1, above_B1, share_B1)
    above_BL = (importance_BL.double() >= quantile_B1) & (importance_BL.double() > ranked_BL[:, :1]) & reasoning_BL
    weight_BL = 1 + beta * above_BL.double()
    mass_B1 = (count_B1 + beta * above_BL.sum(-1, keepdim=True)).clamp_min(1)
    return torch.where(reasoning_BL, weight_BL * count_B1 / mass_B1, 1.0).float()


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


def relative(importance_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """Scores as multiples of their response's mean over its reasoning tokens; a response of zeros stays as it is."""
    total_B1 = importance_BL.double().masked_fill(~reasoning_BL, 0.0).sum(-1, keepdim=True)
    mean_B1 = total_B1 / reasoning_BL.sum(-1, keepdim=True).clamp_min(1)
    return importance_BL / torch.where(mean_B1 > 0, mean_B1, 1.0)


@dataclass(frozen=True)
class Gate:
    """A gate.

    Attributes:
        weights: the function.
        tau: the quantile where the user sets none.
        order_only: the sizes of scores do not matter.
    """

    weights: Callable[[Tensor, Tensor, float, float, float], Tensor]
    tau: float
    order_only: bool = False


GATES: dict[str, Gate] = {"two_level": Gate(two_level, 0.85, order_only=True), "bi_level": Gate(bi_level, 0.4)}


def gate_of(name: str) -> Gate:
    """The gate of that name, or a user's own as `python:<module>:<function>` (tau: 0.85 where the user sets none).

    Raises:
        ValueError: there is none, or what its function returns for a small batch is not weights; says what is wrong.
    """
    if name in GATES:
        return GATES[name]
    own = imported(name, f"allowed: {', '.join(GATES)}, or python:<module>:<function>")
    fault = _fault(own)
    if fault:
        raise ValueError(f"{name} cannot be used: {fault}")
    return Gate(own, GATES["two_level"].tau)


def _fault(own: object) -> str | None:
    if not callable(own):
        return "it must be a function of (importance_BL, reasoning_BL, tau, beta, floor)"
    # The last response has no reasoning, as those that are not scored; scores may be of either precision.
    reasoning_BL = torch.tensor([[False, True, True, True, False], [True] * 5, [False] * 5])
    importance_BL = torch.linspace(0.1, 1.5, 15).view(3, 5)
    try:
        own(importance_BL.double(), reasoning_BL, 0.5, 2.0, 0.1)
        weight_BL = own(importance_BL, reasoning_BL, 0.5, 2.0, 0.1)
    except Exception as error:  # a user's function runs code of its own
        return f"a call with (importance_BL, reasoning_BL, tau, beta, floor) failed: {error!r}"
    if not isinstance(weight_BL, Tensor) or weight_BL.shape != reasoning_BL.shape:
        return "it must return weights of the shape of importance_BL"
    if not kept_mass(weight_BL, reasoning_BL).all():
        return "its weights must be finite, average 1 over each response's reasoning tokens, and be 1 elsewhere"
    return None


def kept_mass(weight_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """bool `[B]`: whether a response's weights are finite, keep its total, and leave other tokens alone."""
    count_B = reasoning_BL.sum(-1)
    total_B = weight_BL.double().masked_fill(~reasoning_BL, 0.0).sum(-1)
    others_B = weight_BL.masked_fill(reasoning_BL, 1.0).eq(1).all(-1)
    return others_B & ((total_B - count_B).abs() <= 1e-3 * count_B.clamp_min(1))
