"""Gates: functions from importance to weights.

A gate takes `importance_BL`, the bool `reasoning_BL`, and those of `tau` in [0, 1], `beta` >= 0 and `floor` in (0, 1] that it
uses. Importance is finite and above -1 at reasoning tokens; other values are ignored. The gate returns float32 weights `[B, L]`
that average 1 over the reasoning tokens of each response and are 1 elsewhere, whatever other responses or padding there are.

Your own: `algorithm.oar.gate=python:my_package.my_module:my_gate`. One of the package's: its function, a line in `GATES`, and
its copy in `page/inspector.js`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from oar_plugin.credit import imported

TINY = torch.finfo(torch.float64).tiny
SETTINGS = "tau", "beta", "floor"  # that a gate can take, in the order of its arguments


def bi_level(
    importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.4, beta: float = 2.0, floor: float = 0.1
) -> Tensor:
    """The paper's gate (arXiv 2601.07408, reshaping). The paper finds tau stable from 0.3 to 0.7.

    Per response with `R` reasoning tokens and importance `I`:
    1. `s = log1p(I)`, scaled so that the minimum is 0 and the maximum 1. If all `I` are equal, `s = 0`.
    2. `q` is the tau-quantile of `s`, with linear interpolation. (The published code overwrites tau with `q`.)
    3. `w = max(s / q, floor)` where `s < q`; `w = 1 + beta (s - q) / (1 - q)` where `s >= q`.
    4. `w` is multiplied by `R / sum(w)`.

    The logarithm is meant for importance in nats. Importance without a unit must be divided by its mean first (`relative`).
    """
    outside_BL = ~reasoning_BL
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    last_B1 = (count_B1 - 1).clamp_min(0)
    place_B2, share_B1 = _quantile_places(count_B1, tau)
    place_B4 = torch.cat([torch.zeros_like(last_B1), place_B2, last_B1], -1)
    # The logarithm keeps the order, so values are sorted first, and the logarithm is computed at four places only.
    picked_B4 = sorted_rows(importance_BL.masked_fill(outside_BL, torch.inf)).gather(-1, place_B4).double().log1p()
    low_B1, high_B1 = picked_B4[:, :1], picked_B4[:, 3:]
    flat_B1 = ~(high_B1 > low_B1)
    low_B1 = low_B1.masked_fill(flat_B1, 0.0)
    span_B1 = torch.where(flat_B1, torch.inf, high_B1 - low_B1)
    below_B1, above_B1 = ((picked_B4[:, 1:3] - low_B1) / span_B1).chunk(2, -1)
    quantile_B1 = torch.lerp(below_B1, above_B1, share_B1)

    # In float64, because a difference of nearly equal scores loses digits.
    score_BL = importance_BL.masked_fill(outside_BL, 0.0).double().log1p_().sub_(low_B1).div_(span_B1)
    weight_BL = torch.where(
        score_BL < quantile_B1,
        (score_BL / quantile_B1.clamp_min(TINY)).clamp_min_(floor),
        (score_BL - quantile_B1).mul_(beta).div_((1 - quantile_B1).clamp_min(TINY)).add_(1.0),
    )
    total_B1 = row_sums(weight_BL.masked_fill_(outside_BL, 0.0)).clamp_min(TINY)
    return weight_BL.mul_(count_B1 / total_B1).masked_fill_(outside_BL, 1.0).float()


def two_level(importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.85, beta: float = 2.0) -> Tensor:
    """Weight `1 + beta` at and above the tau-quantile of importance, 1 below it; then scaled to average 1. Not in the paper.

    Only the order of importance matters. Tokens with the response's minimum importance always get weight 1. Without this rule,
    all tokens would get `1 + beta` if the quantile is the minimum.
    """
    above_BL = _above(importance_BL, reasoning_BL, tau)
    weight_BL = 1 + beta * above_BL.double()
    count_B1 = reasoning_BL.sum(-1, keepdim=True)
    total_B1 = (count_B1 + beta * above_BL.sum(-1, keepdim=True)).clamp_min(1)
    return torch.where(reasoning_BL, weight_BL * count_B1 / total_B1, 1.0).float()


def top_only(importance_BL: Tensor, reasoning_BL: Tensor, tau: float = 0.8) -> Tensor:
    """Weight 0 below the tau-quantile of importance, equal weights at and above it: only the top tokens are learned from.

    With `importance=entropy` it is the "80/20 rule" of arXiv 2506.01939, whose quantile is that of the batch, with the answer.
    Here it is that of the response's reasoning tokens, and other tokens keep weight 1. Tokens with the response's minimum
    importance always get weight 0, unless all are equal.
    """
    above_BL = _above(importance_BL, reasoning_BL, tau)
    kept_B1 = above_BL.sum(-1, keepdim=True)
    weight_BL = above_BL.double() * reasoning_BL.sum(-1, keepdim=True) / kept_B1.clamp_min(1)
    return torch.where(reasoning_BL & (kept_B1 > 0), weight_BL, 1.0).float()


def z_score(importance_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """The map of GRAIL (arXiv 2606.04889), for `importance=grail`: standardized logarithm of importance, clipped.

    Per response, `z` is `log(I + 1e-8)` less its mean, divided by its standard deviation; `w = clip(1 + z / 2, 1/2, 5)`, with
    the published constants. There the weights stay as they are, here they are scaled to average 1.
    """
    count_B1, outside_BL = reasoning_BL.sum(-1, keepdim=True).clamp_min(1), ~reasoning_BL
    log_BL = importance_BL.double().clamp_min(0.0).add_(1e-8).log_().masked_fill_(outside_BL, 0.0)
    off_BL = log_BL.sub_(row_sums(log_BL) / count_B1).masked_fill_(outside_BL, 0.0)
    deviation_B1 = (row_sums(off_BL.square()) / count_B1 + 1e-8).sqrt()
    weight_BL = (1 + off_BL / deviation_B1 / 2).clamp_(0.5, 5.0)
    return torch.where(reasoning_BL, relative(weight_BL, reasoning_BL), 1.0).float()


@dataclass(frozen=True)
class Gate:
    function: Callable[..., Tensor]  # see the docstring of this module
    tau: float = 0.85  # default of the setting `tau`
    order_only: bool = False  # the weights depend only on the order of importance

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that the function takes. A function of five arguments takes all three, whatever their names."""
        try:
            signature = inspect.signature(self.function)
            signature.bind(None, None, *SETTINGS)
        except ValueError:  # a function that is not written in Python has no signature
            return SETTINGS
        except TypeError:  # the function does not accept five arguments
            return tuple(name for name in SETTINGS if name in signature.parameters)
        return SETTINGS

    def weights(self, importance_BL: Tensor, reasoning_BL: Tensor, tau: float, beta: float, floor: float) -> Tensor:
        """Calls the function with the settings that it takes. Returns weights `[B, L]`."""
        if self.settings == SETTINGS:
            return self.function(importance_BL, reasoning_BL, tau, beta, floor)
        given = {"tau": tau, "beta": beta, "floor": floor}
        return self.function(importance_BL, reasoning_BL, **{name: given[name] for name in self.settings})


GATES: dict[str, Gate] = {
    "two_level": Gate(two_level, tau=0.85, order_only=True),
    "bi_level": Gate(bi_level, tau=0.4),
    "top_only": Gate(top_only, tau=0.8, order_only=True),
    "z_score": Gate(z_score),
}
_OWN: dict[str, Gate] = {}  # users' gates that passed the check, by name


def gate_of(name: str) -> Gate:
    """Returns the gate with this name. `python:<module>:<function>` names a user's own gate, which is checked on a small batch.

    ValueError: there is no such gate, or the function failed the check. The message says what is wrong.
    """
    if name in GATES:
        return GATES[name]
    function = imported(name, f"allowed: {', '.join(GATES)}, or python:<module>:<function>")
    if name not in _OWN or _OWN[name].function != function:  # a notebook may define the function again
        gate = Gate(function)
        if fault := _fault(gate):
            raise ValueError(f"{name} cannot be used: {fault}")
        _OWN[name] = gate
    return _OWN[name]


def _fault(gate: Gate) -> str | None:
    """Says why a user's gate cannot be used; None if it can be used."""
    if not callable(gate.function):
        settings = ", ".join(SETTINGS)
        return f"it must be a function of (importance_BL, reasoning_BL, {settings}) or fewer of the last three"
    # The last response has no reasoning, like a response that is not scored. Importance may be float32 or float64.
    reasoning_BL = torch.tensor([[False, True, True, True, False], [True] * 5, [False] * 5])
    importance_BL = torch.linspace(0.1, 1.5, 15).view(3, 5)
    try:
        gate.weights(importance_BL.double(), reasoning_BL, 0.5, 2.0, 0.1)
        weight_BL = gate.weights(importance_BL, reasoning_BL, 0.5, 2.0, 0.1)
        fits = weight_BL.shape == reasoning_BL.shape and kept_total(weight_BL, reasoning_BL).all()
        # Each rank calls the gate with its own responses, whose longest one decides the padding.
        alone_1W = gate.weights(pad(importance_BL[:1], (0, 1)), pad(reasoning_BL[:1], (0, 1)), 0.5, 2.0, 0.1)
        same = torch.allclose(alone_1W[:, :5].float(), weight_BL[:1].float(), atol=1e-4)
    except Exception as error:  # a user's function runs code of its own
        return f"a call with ({', '.join(['importance_BL', 'reasoning_BL', *gate.settings])}) failed: {error!r}"
    if not fits:
        return "its weights [B, L] must be finite, average 1 over each response's reasoning tokens, and be 1 elsewhere"
    return None if same else "a response's weights must not depend on other responses or on padding"


def kept_total(weight_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """Bool `[B]`: true if weights are finite, average 1 over the reasoning tokens, and are 1 at all other tokens."""
    count_B = reasoning_BL.sum(-1)
    total_B = weight_BL.double().masked_fill(~reasoning_BL, 0.0).sum(-1)
    others_B = weight_BL.masked_fill(reasoning_BL, 1.0).eq(1).all(-1)
    return others_B & ((total_B - count_B).abs() <= 1e-3 * count_B.clamp_min(1))


def relative(importance_BL: Tensor, reasoning_BL: Tensor) -> Tensor:
    """Importance, or weights, divided by the mean over the response's reasoning tokens; unchanged if the mean is 0."""
    total_B1 = row_sums(importance_BL.double().masked_fill(~reasoning_BL, 0.0))
    mean_B1 = total_B1 / reasoning_BL.sum(-1, keepdim=True).clamp_min(1)
    return importance_BL / torch.where(mean_B1 > 0, mean_B1, 1.0)


def _above(importance_BL: Tensor, reasoning_BL: Tensor, tau: float) -> Tensor:
    """Bool `[B, L]`: reasoning tokens at or above the tau-quantile of importance and above the minimum."""
    place_B2, share_B1 = _quantile_places(reasoning_BL.sum(-1, keepdim=True), tau)
    ranked_BL = sorted_rows(importance_BL.double().masked_fill(~reasoning_BL, torch.inf))
    below_B1, above_B1 = ranked_BL.gather(-1, place_B2).chunk(2, -1)
    quantile_B1 = torch.lerp(below_B1, above_B1, share_B1)
    return (importance_BL.double() >= quantile_B1) & (importance_BL.double() > ranked_BL[:, :1]) & reasoning_BL


def _quantile_places(count_B1: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Indices of the two sorted values around the tau-quantile, int64 `[B, 2]`, and the weight of the second one, `[B, 1]`."""
    # Not `Tensor.nanquantile`: the same numbers, but 4 times as slow (1,024 x 4,096 on a CPU), two_level then 1.6 times.
    last_B1 = (count_B1 - 1).clamp_min(0)
    rank_B1 = tau * last_B1.double()
    lower_B1 = rank_B1.floor().long()
    return torch.cat([lower_B1, torch.minimum(lower_B1 + 1, last_B1)], -1), rank_B1 - lower_B1


def row_sums(values_BL: Tensor) -> Tensor:
    """The sum of each row, `[B, 1]`. Unlike those of `Tensor.sum`, its roundings do not change with zeros on the right."""
    while (columns := values_BL.shape[-1]) > 1:
        even_BL, odd_BL = values_BL[:, ::2], values_BL[:, 1::2]
        values_BL = even_BL + odd_BL if columns % 2 == 0 else even_BL + pad(odd_BL, (0, 1))
    return values_BL


def sorted_rows(values_BL: Tensor) -> Tensor:
    """Each row of `values_BL` in ascending order. On a CPU, `values_BL` itself is sorted."""
    if values_BL.device.type != "cpu":
        return values_BL.sort(-1).values
    values_BL.numpy().sort(-1)  # torch's sort is 5 to 15 times as slow, and the gates with it 1.6 to 2.4 times
    return values_BL
