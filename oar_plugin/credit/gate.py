"""Gates: functions from importance to weights that keep each response's total.

To add one: its function, a line in `GATES`, its copy in `page/inspector.js`. To bring one of your own, without touching the
package: `algorithm.oar.gate=python:my_package.my_module:my_gate`.

A gate takes `importance_BL`, finite and above -1 where the bool `reasoning_BL` is true and ignored elsewhere, and those of
`tau` in [0, 1], `beta` >= 0 and `floor` in (0, 1] that it uses. It returns float32 weights `[B, L]` that average 1 over each
response's reasoning tokens and are 1 elsewhere.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oar_plugin.credit import imported

SETTINGS = ("tau", "beta", "floor")
"""The settings that a gate can take, in this order."""


def bi_level(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The paper's gate (arXiv 2601.07408, reshaping); its stable range of tau is 0.3 to 0.7.

    Per response, over its `R` reasoning tokens:
    1. `s = log1p(I)`, min-max to [0, 1]; a constant response becomes all zeros;
    2. `q` is the tau-quantile of `s`, with linear interpolation. tau is the same for every response (the published code
       overwrites it with each response's `q`);
    3. `s < q`: `w = max(s / q, floor)`; `s >= q`: `w = 1 + beta (s - q) / (1 - q)`;
    4. `w <- w R / sum(w)`.

    The logarithm is meant for nats. Scores of an arbitrary scale must be divided by their mean first (`relative`).
    """
    outside_BL = ~reasoning_BL
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    last_B1 = (count_B1 - 1).clamp_min(0)
    place_B2, share_B1 = _quantile_places(count_B1, tau)
    place_B4 = torch.cat([torch.zeros_like(last_B1), place_B2, last_B1], -1)
    # Sorted before the logarithm, which keeps their order and is needed at four places only.
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
    total_B1 = weight_BL.masked_fill_(outside_BL, 0.0).sum(-1, keepdim=True).clamp_min(tiny)
    return weight_BL.mul_(count_B1 / total_B1).masked_fill_(outside_BL, 1.0).float()


def two_level(importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.85, beta: float = 2.0) -> Tensor:
    """Two weights per response: `1 + beta` at and above the tau-quantile and 1 below, scaled to average 1.

    Not in the paper. Only the order of the scores counts, so neither an outlier nor small differences, which are mostly
    noise, change the weights. A token at the response's minimum is never boosted: with more than `tau` of the scores there,
    the quantile is the minimum itself, and every token would reach it.
    """
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    place_B2, share_B1 = _quantile_places(count_B1, tau)
    ranked_BL = sorted_rows(importance_BL.double().masked_fill(~reasoning_BL, torch.inf))
    below_B1, above_B1 = ranked_BL.gather(-1, place_B2).chunk(2, -1)
    quantile_B1 = torch.lerp(below_B1, above_B1, share_B1)
    above_BL = (importance_BL.double() >= quantile_B1) & (importance_BL.double() > ranked_BL[:, :1]) & reasoning_BL
    weight_BL = 1 + beta * above_BL.double()
    total_B1 = (count_B1 + beta * above_BL.sum(-1, keepdim=True)).clamp_min(1)
    return torch.where(reasoning_BL, weight_BL * count_B1 / total_B1, 1.0).float()


@dataclass(frozen=True)
class Gate:
    """A gate.

    Attributes:
        function: as this module's docstring says.
        tau: the default of the setting `tau`.
        order_only: the weights depend only on the order of the scores.
    """

    function: Callable[..., Tensor]
    tau: float
    order_only: bool = False

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """The settings that the function takes, by its signature: all three if it accepts five arguments, of any names."""
        try:
            signature = inspect.signature(self.function)
            signature.bind(None, None, *SETTINGS)
        except ValueError:  # it has no signature: it is not written in Python
            return SETTINGS
        except TypeError:  # it does not accept five arguments
            return tuple(name for name in SETTINGS if name in signature.parameters)
        return SETTINGS

    def weights(self, importance_BL: Tensor, reasoning_BL: Tensor, tau: float, beta: float, floor: float) -> Tensor:
        """Call the function with the settings that it takes."""
        if self.settings == SETTINGS:
            return self.function(importance_BL, reasoning_BL, tau, beta, floor)
        given = {"tau": tau, "beta": beta, "floor": floor}
        return self.function(importance_BL, reasoning_BL, **{name: given[name] for name in self.settings})


GATES: dict[str, Gate] = {"two_level": Gate(two_level, tau=0.85, order_only=True), "bi_level": Gate(bi_level, tau=0.4)}
_OWN: dict[str, Gate] = {}  # users' gates that passed the check, by name


def gate_of(name: str) -> Gate:
    """The gate of that name, or a user's own as `python:<module>:<function>` (tau: 0.85 where the user sets none).

    A user's function is tried once on a small batch, and again if a notebook has defined it anew.

    Raises:
        ValueError: there is no such gate, or the function does not return weights; says what is wrong.
    """
    if name in GATES:
        return GATES[name]
    function = imported(name, f"allowed: {', '.join(GATES)}, or python:<module>:<function>")
    if name not in _OWN or _OWN[name].function != function:
        gate = Gate(function, GATES["two_level"].tau)
        if fault := _fault(gate):
            raise ValueError(f"{name} cannot be used: {fault}")
        _OWN[name] = gate
    return _OWN[name]


def _fault(gate: Gate) -> str | None:
    """What is wrong with a user's gate; None where it can be used."""
    if not callable(gate.function):
        return (
            f"it must be a function of (importance_BL, reasoning_BL, {', '.join(SETTINGS)}) or fewer of the last three"
        )
    # The last response has no reasoning, as one that is not scored; scores may be float32 or float64.
    reasoning_BL = torch.tensor([[False, True, True, True, False], [True] * 5, [False] * 5])
    importance_BL = torch.linspace(0.1, 1.5, 15).view(3, 5)
    try:
        gate.weights(importance_BL.double(), reasoning_BL, 0.5, 2.0, 0.1)
        weight_BL = gate.weights(importance_BL, reasoning_BL, 0.5, 2.0, 0.1)
    except Exception as error:  # a user's function runs code of its own
        return f"a call with ({', '.join(['importance_BL', 'reasoning_BL', *gate.settings])}) failed: {error!r}"
    if not isinstance(weight_BL, Tensor) or weight_BL.shape != reasoning_BL.shape:
        return "it must return weights of the shape of importance_BL"
    if not kept_total(weight_BL, reasoning_BL).all():
        return "its weights must be finite, average 1 over each response's reasoning tokens, and be 1 elsewhere"
    return None


def kept_total(weight_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """Whether each response's weights are finite, average 1 over its reasoning tokens and are 1 elsewhere, bool `[B]`."""
    count_B = reasoning_BL.sum(-1)
    total_B = weight_BL.double().masked_fill(~reasoning_BL, 0.0).sum(-1)
    others_B = weight_BL.masked_fill(reasoning_BL, 1.0).eq(1).all(-1)
    return others_B & ((total_B - count_B).abs() <= 1e-3 * count_B.clamp_min(1))


def relative(importance_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """Scores divided by their mean over the response's reasoning tokens; a response of zeros stays as it is."""
    total_B1 = importance_BL.double().masked_fill(~reasoning_BL, 0.0).sum(-1, keepdim=True)
    mean_B1 = total_B1 / reasoning_BL.sum(-1, keepdim=True).clamp_min(1)
    return importance_BL / torch.where(mean_B1 > 0, mean_B1, 1.0)


def _quantile_places(count_B1: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Places of the two ascending values around the tau-quantile, int64 `[B, 2]`, and how far it is between them, `[B, 1]`."""
    last_B1 = (count_B1 - 1).clamp_min(0)
    rank_B1 = tau * last_B1.double()
    lower_B1 = rank_B1.floor().long()
    return torch.cat([lower_B1, torch.minimum(lower_B1 + 1, last_B1)], -1), rank_B1 - lower_B1


def sorted_rows(values_BL: Tensor) -> Tensor:
    """Each row of `values_BL` in ascending order; on a CPU it is sorted in place."""
    if values_BL.device.type != "cpu":
        return values_BL.sort(-1).values
    values_BL.numpy().sort(-1)  # numpy's sort uses vector instructions: up to 50 times as fast as torch's here
    return values_BL
