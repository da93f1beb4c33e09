"""OAR-P on the rollout engines, the driver's part: switching it on, and choosing between the engines' results and the actor's.

The engines' scores have fields of their own beside the actor's, because the actor writes its fields for all rows when it is
asked for any. A further field, `oar_offload`, holds how the scoring of each response went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl.settings import MANAGER
from oar_plugin.output import logger
from oar_plugin.passes.request import FIELDS, MEASURES, SECONDS, STATUS, WEIGHTS, nested

OFFLOAD = "oar_offload"
ENGINE_FIELDS = {name: f"{name}_of_engines" for name in FIELDS if name != SECONDS}

ACTOR_MAY_HELP = (
    Status.NOT_NEEDED,  # rewards are equal, and yet the advantage is not zero: the base normalises over the batch
    Status.NOT_SCORED,
    Status.NON_FINITE,
    Status.TIMED_OUT,
    Status.TOO_LONG,
    Status.ABORTED,
    Status.ENGINE_FAILED,
)
"""Statuses from the engines after which the actor can still score a response (`perturbation.fallback`)."""

_DECILES = 11


def switch_on(config: DictConfig, oar: OarConfig) -> None:
    """Set our agent-loop manager and vLLM's priority scheduling, and register servers that can score.

    Copies run after generation, whose requests all have the same priority and keep the order of their arrival.
    """
    from oar_plugin.hosts.verl import rollout_server

    rollout_server.register(oar.perturbation.max_in_flight, oar.perturbation.share_while_generating)
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        rollout.agent.agent_loop_manager_class = MANAGER
        if rollout.scheduling_policy != "priority":
            logger.info("actor_rollout_ref.rollout.scheduling_policy: priority (was %s)", rollout.scheduling_policy)
            rollout.scheduling_policy = "priority"


def actor_may_help(status_B: Tensor) -> Tensor:
    """Rows that the engines did not score and the actor still can, bool `[B]`, by the engines' `Status`."""
    return torch.isin(status_B, torch.tensor(ACTOR_MAY_HELP))


def merged(data: Mapping[str, Tensor], asked_B: Tensor, padding_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (nested like `advantages`), status `[B]` and measures `[B, M]`: the actor's where it was asked, or the engines'.

    `data` has nested `advantages`, the engines' fields, and the actor's if it was asked for any row (bool `asked_B`). The rows
    of `padding_B` (bool) are copies of others that fill up verl's batch, shorter than what the engines scored.
    """

    def chosen(name: str) -> list[Tensor]:
        theirs = data[ENGINE_FIELDS[name]].unbind()
        own = data[name].unbind() if name in data else theirs
        return [mine if asked else other for mine, other, asked in zip(own, theirs, asked_B.tolist(), strict=True)]

    weights = chosen(WEIGHTS)
    for row in padding_B.nonzero()[:, 0].tolist():
        weights[row] = torch.ones_like(data["advantages"][row])
    status_B = torch.cat(chosen(STATUS)).masked_fill(padding_B, int(Status.NOT_NEEDED))
    return nested(weights), status_B, pad_sequence(chosen(MEASURES), True, torch.nan)  # engines predict nothing


@dataclass(frozen=True)
class OffloadRecord:
    """How the scoring of one response on the rollout engines went."""

    status: int  # of `Status`; SCORED when the engines delivered
    attempts: int = 0  # calls to an engine
    copies: int = 0  # that were run
    retried: int = 0  # requests that were made a second time
    tokens: int = 0  # prompt tokens of all requests
    cached_tokens: int = 0  # how many of these came from the prefix cache
    generated_at: float = 0.0  # wall clock, seconds, when the response was finished
    done_at: tuple[float, ...] = (0.0,) * _DECILES  # wall clock of the first finished copy, each tenth and the last

    def to_row(self) -> Tensor:
        """float64: the wall clock needs it."""
        *numbers, done_at = astuple(self)
        return torch.tensor([*numbers, *done_at], dtype=torch.float64)

    @classmethod
    def from_row(cls, row: Tensor) -> OffloadRecord:
        status, attempts, copies, retried, tokens, cached_tokens = map(int, row[:6].tolist())
        return cls(status, attempts, copies, retried, tokens, cached_tokens, row[6].item(), tuple(row[7:].tolist()))

    def done_by(self, moment: float) -> float:
        """Number of copies that were finished at a moment of the wall clock, interpolated."""
        return self.copies * float(np.interp(moment, self.done_at, np.linspace(0, 1, _DECILES)))


def deciles(moments: Sequence[float]) -> tuple[float, ...]:
    """Minimum, each tenth and maximum of some moments (zeros when there are none)."""
    return tuple(np.quantile(moments or [0.0], np.linspace(0, 1, _DECILES)).tolist())


def offload_metrics(rows: Sequence[Tensor], asked_B: Tensor) -> dict[str, float]:
    """Metrics of a batch, by name without prefix.

    `rows` are the records (`OFFLOAD`) of a batch without verl's padding rows; the actor was asked for the rows of `asked_B`.

    Returns counts, `left_for_actor` (share of the rows that the actor had to help with), and, where anything was sent to an
    engine, `scored` (share of it that the engines scored), `cached_share` (tokens that the prefix cache saved), `hidden_share`
    (copies finished before the last response of the batch was: they cost no time of their own), `exposed_s` (seconds that the
    batch waited for copies after that).
    """
    records = [OffloadRecord.from_row(row) for row in rows]
    sent = [record for record in records if record.attempts]
    copies, tokens = sum(record.copies for record in sent), sum(record.tokens for record in sent)
    metrics = {
        "responses": float(len(sent)),
        "copies": float(copies),
        "tokens": float(tokens),
        "retried_copies": float(sum(record.retried for record in sent)),
        "retried_responses": float(sum(record.attempts > 1 for record in sent)),
        "left_for_actor": asked_B.float().mean().item(),
    }
    if not sent:
        return metrics
    by_status = Counter(Status(record.status) for record in sent)
    metrics["scored"] = by_status.pop(Status.SCORED, 0) / len(sent)
    metrics |= {f"fault/{status.name.lower()}": float(count) for status, count in by_status.items()}
    metrics["cached_share"] = sum(record.cached_tokens for record in sent) / max(1, tokens)
    generated = max(record.generated_at for record in records)
    if copies:
        metrics["hidden_share"] = sum(record.done_by(generated) for record in sent) / copies
    metrics["exposed_s"] = max(0.0, max(record.done_at[-1] for record in sent) - generated)
    return metrics
