"""OAR-P on the rollout engines, the driver's part: switching it on, and choosing between the engines' results and the actor's.

The engines' scores have fields of their own beside the actor's, because the actor writes its fields for all rows when it is
asked for any. A further field, `oar_offload`, holds how the scoring of each response went.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import MEASURE_NAMES, Status
from oar_plugin.hosts.verl.settings import MANAGER
from oar_plugin.output import logger
from oar_plugin.passes.request import FIELDS, MEASURES, SECONDS, STATUS, WEIGHTS, nested

OFFLOAD = "oar_offload"
TENTHS = np.linspace(0, 1, 11)
ENGINE_FIELDS = {name: f"{name}_of_engines" for name in FIELDS if name != SECONDS}

FAULTS = Status.NON_FINITE, Status.TIMED_OUT, Status.TOO_LONG, Status.ABORTED, Status.ENGINE_FAILED
# NOT_NEEDED: rewards are equal, and yet the advantage is not zero, because the base normalises over the batch.
ACTOR_MAY_HELP = torch.tensor([Status.NOT_NEEDED, Status.NOT_SCORED, *FAULTS])
"""Statuses from the engines after which the actor can still score a response (`perturbation.fallback`)."""


def switch_on(config: DictConfig, oar: OarConfig) -> None:
    """Set our agent-loop manager and vLLM's priority scheduling (copies run after generation), and register our servers."""
    from oar_plugin.hosts.verl import rollout_server

    rollout_server.register(oar.perturbation.max_in_flight, oar.perturbation.share_while_generating)
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        rollout.agent.agent_loop_manager_class = MANAGER
        if rollout.scheduling_policy != "priority":
            logger.info("actor_rollout_ref.rollout.scheduling_policy: priority (was %s)", rollout.scheduling_policy)
            rollout.scheduling_policy = "priority"


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
    measure_BM = pad_sequence(chosen(MEASURES), True, torch.nan)
    measure_BM[:, len(MEASURE_NAMES) :][:, :1].nan_to_num_(0.0)  # engines predict nothing
    return nested(weights), status_B, measure_BM


class OffloadRecord(NamedTuple):
    """How the scoring of one response on the rollout engines went. Moments are seconds of the wall clock."""

    status: int  # a `Status`; SCORED when the engines delivered
    attempts: int = 0  # calls to an engine
    copies: int = 0  # that were run
    retried: int = 0  # requests that were made a second time
    tokens: int = 0  # prompt tokens of all requests
    cached_tokens: int = 0  # how many of these came from the prefix cache
    generated_at: float = 0.0  # the moment when the response was finished
    # When the first of its copies was finished, each tenth and the last.
    done_at: Sequence[float] = (0.0,) * len(TENTHS)

    def to_row(self) -> Tensor:
        return torch.tensor([*self[:-1], *self.done_at], dtype=torch.float64)  # the wall clock needs it


def offload_metrics(record_BN: Tensor, left_B: Tensor) -> dict[str, float]:
    """Metrics of a batch without verl's padding rows, by name without prefix, from its records (`OFFLOAD`).

    `retried_copies`; `left_for_actor`, the share of the rows that the actor had to help with (`left_B`). If anything was sent
    to an engine: `scored`, the share of it that the engines scored, and `fault/*`; `cached_share`, the share of the tokens that
    the prefix cache saved; `hidden_share`, the share of the copies that were finished before the batch's last response was;
    `exposed_s`, the seconds that the batch waited for copies after that.
    """
    records = [OffloadRecord(*row[:-11])._replace(done_at=row[-11:]) for row in record_BN.tolist()]
    sent = [record for record in records if record.attempts]
    metrics = {"retried_copies": sum(record.retried for record in sent), "left_for_actor": left_B.float().mean().item()}
    if not sent:
        return metrics
    by_status = Counter(Status(record.status) for record in sent)
    metrics["scored"] = by_status.pop(Status.SCORED, 0) / len(sent)
    metrics |= {f"fault/{status.name.lower()}": float(count) for status, count in by_status.items()}
    generated = max(record.generated_at for record in records)
    if copies := sum(record.copies for record in sent):
        hidden = (one.copies * float(np.interp(generated, one.done_at, TENTHS)) for one in sent)
        metrics["hidden_share"] = sum(hidden) / copies
    metrics["cached_share"] = sum(one.cached_tokens for one in sent) / max(1, sum(one.tokens for one in sent))
    metrics["exposed_s"] = max(0.0, max(record.done_at[-1] for record in sent) - generated)
    return metrics
