"""What one response's scoring on the rollout engines was like: a row of the batch, `oar_offload`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.request import FIELDS

OFFLOAD = "oar_offload"
ENGINE_FIELDS = {name: f"{name}_of_engines" for name in FIELDS}
"""The engines' scores have fields of their own, because the actor writes its fields for all rows when it is asked for any."""

_DECILES = 11


@dataclass(frozen=True)
class OffloadRecord:
    """One response.

    Attributes:
        status: of `Status`; SCORED when the engines delivered.
        attempts: calls to an engine.
        copies: copies that were run.
        retried: copies among them that had to be run a second time.
        tokens: prompt tokens of all requests.
        cached_tokens: those of them that came from the prefix cache.
        generated_at: wall clock, seconds, when the response was finished.
        done_at: wall clock at which the first copy, each tenth and the last were finished.
    """

    status: int
    attempts: int = 0
    copies: int = 0
    retried: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    generated_at: float = 0.0
    done_at: tuple[float, ...] = field(default=(0.0,) * _DECILES)

    def to_row(self) -> Tensor:
        """float64: the wall clock needs it."""
        *numbers, done_at = astuple(self)
        return torch.tensor([*numbers, *done_at], dtype=torch.float64)

    @classmethod
    def from_row(cls, row: Tensor) -> OffloadRecord:
        status, attempts, copies, retried, tokens, cached_tokens = map(int, row[:6].tolist())
        return cls(status, attempts, copies, retried, tokens, cached_tokens, row[6].item(), tuple(row[7:].tolist()))

    def done_by(self, moment: float) -> float:
        """Copies that were finished at a moment of the wall clock, interpolated."""
        share = sum(
            min(1.0, max(0.0, (moment - a) / (b - a))) if b > a else float(moment >= b)
            for a, b in zip(self.done_at, self.done_at[1:], strict=False)
        )
        return self.copies * share / (_DECILES - 1)


def deciles(moments: Sequence[float]) -> tuple[float, ...]:
    """Minimum, each tenth and maximum of some moments (zeros when there are none)."""
    if not moments:
        return (0.0,) * _DECILES
    steps = torch.linspace(0, 1, _DECILES, dtype=torch.float64)
    return tuple(torch.tensor(moments, dtype=torch.float64).quantile(steps).tolist())


def summarize_offload(records: Sequence[OffloadRecord]) -> dict[str, float]:
    """Metrics of a batch, by name without prefix.

    Returns:
        `scored` (share of the responses sent to an engine that it scored), `copies`, `tokens`, `cached_share` (tokens that
        the prefix cache saved), `retried_copies`, `retried_responses`, `hidden_share` (copies finished before the last
        response of the batch was: they cost no time of their own), `exposed_s` (seconds that the batch waited for copies
        after that). Only `scored` and zero counts when nothing was sent.
    """
    sent = [record for record in records if record.attempts]
    metrics = {
        "responses": float(len(sent)),
        "copies": float(sum(record.copies for record in sent)),
        "tokens": float(sum(record.tokens for record in sent)),
        "retried_copies": float(sum(record.retried for record in sent)),
        "retried_responses": float(sum(record.attempts > 1 for record in sent)),
    }
    if not sent:
        return metrics
    metrics["scored"] = sum(record.status == Status.SCORED for record in sent) / len(sent)
    metrics["cached_share"] = sum(record.cached_tokens for record in sent) / max(1.0, metrics["tokens"])
    generated = max(record.generated_at for record in records)
    if metrics["copies"]:
        metrics["hidden_share"] = sum(record.done_by(generated) for record in sent) / metrics["copies"]
    metrics["exposed_s"] = max(0.0, max(record.done_at[-1] for record in sent) - generated)
    return metrics
