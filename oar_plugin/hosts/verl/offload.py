"""OAR-P on the rollout engines, as the driver sees it: is it possible here, switch it on, read what came back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.gate import relative
from oar_plugin.credit.importance import importance_of
from oar_plugin.hosts.verl.offload_record import ENGINE_FIELDS, OffloadRecord, summarize_offload
from oar_plugin.hosts.vllm.versions import installed, unsupported
from oar_plugin.passes.request import IMPORTANCE, REPORT, SEGMENTS

logger = logging.getLogger("oar_plugin")

MANAGER = "oar_plugin.hosts.verl.agent_loop.OarAgentLoopManager"

ACTOR_MAY_HELP = (
    Status.NOT_NEEDED,  # rewards are equal, and yet the advantage is not zero: the base normalises over the batch
    Status.NOT_SCORED,
    Status.NON_FINITE,
    Status.TIMED_OUT,
    Status.TOO_LONG,
    Status.ABORTED,
    Status.ENGINE_FAILED,
)
"""What the engines say of a response that the actor can still score (`perturbation.fallback`)."""

_LOCAL = "or algorithm.oar.perturbation.backend=actor"


def faults(config: DictConfig) -> Iterator[str]:
    """Why the rollout engines of this configuration cannot score: each key, its value and what is allowed."""

    def value(key: str) -> Any:
        return OmegaConf.select(config, f"actor_rollout_ref.rollout.{key}")

    rollout = "actor_rollout_ref.rollout"
    if value("name") != "vllm":
        yield f"{rollout}.name={value('name')}: copies are scored inside vLLM's workers; allowed: vllm, {_LOCAL}"
    reason = unsupported(installed())
    if reason is not None:
        yield f"algorithm.oar.perturbation.backend=rollout: {reason}; allowed: one of these, {_LOCAL}"
    if value("agent.agent_loop_manager_class") not in (None, MANAGER):
        yield (
            f"{rollout}.agent.agent_loop_manager_class={value('agent.agent_loop_manager_class')}: copies are scored by "
            f"an agent-loop manager of our own; allowed: null, {_LOCAL}"
        )
    if value("engine_kwargs.vllm.worker_extension_cls") is not None:
        yield (
            f"{rollout}.engine_kwargs.vllm.worker_extension_cls={value('engine_kwargs.vllm.worker_extension_cls')}: "
            f"vLLM takes one worker extension, and this needs its own; allowed: unset, {_LOCAL}"
        )
    for key in ("data_parallel_size", "pipeline_model_parallel_size"):
        if (value(key) or 1) > 1:
            yield (
                f"{rollout}.{key}={value(key)}: a response and its copies must meet the same engine, which was tested "
                f"with 1 only; allowed: 1, {_LOCAL}"
            )
    for key in ("disaggregation.enabled", "mtp.enable_rollout"):
        if value(key):
            yield f"{rollout}.{key}=True: not tested with copies in the engine; allowed: False, {_LOCAL}"


def switch_on(config: DictConfig, oar: OarConfig) -> None:
    """Set what the offload needs in verl's configuration, and register servers that can score.

    * the agent-loop manager, verl's extension point;
    * vLLM's priority scheduling, so that copies come behind generation. Requests of equal priority, which generation's
      are, keep the order of their arrival.
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
    """bool `[B]`: rows that the engines did not score and the actor still can, by the engines' `Status`."""
    return torch.isin(status_B, torch.tensor(ACTOR_MAY_HELP))


def merged(padded: TensorDict, asked_B: Tensor, padding_B: Tensor, oar: OarConfig) -> dict[str, Tensor]:
    """Importance, segments and report of each row: the actor's where it was asked, the engines' elsewhere.

    The engines' scores are nats. Those of a fallback whose scale is arbitrary become multiples of their response's mean, as
    the gate would have them if the whole run had that importance.

    Args:
        padded: `advantages` `[B, L]`, the engines' fields, and the actor's if it was asked for any row.
        asked_B: bool, rows that the actor was to score.
        padding_B: bool, rows that verl added to fill up the batch: copies of others, shorter than what the engines scored.
        oar: the settings.
    """
    length = padded["advantages"].shape[-1]
    fields = {}
    for name, of_engines in ENGINE_FIELDS.items():
        width = 2 if name == REPORT else length
        theirs = _to_width(padded[of_engines], width)
        fields[name] = torch.where(asked_B[:, None], _to_width(padded.get(name, theirs), width), theirs)
        fields[name][padding_B] = 0
    fields[REPORT][padding_B, 0] = float(Status.NOT_NEEDED)
    if asked_B.any() and importance_of(oar.perturbation.fallback).arbitrary_scale:
        importance, reasoning = fields[IMPORTANCE], fields[SEGMENTS] == Segment.REASONING
        fields[IMPORTANCE] = torch.where(asked_B[:, None], relative(importance, reasoning).float(), importance)
    return fields


def _to_width(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[-1]))


def offload_metrics(rows: Sequence[Tensor], asked_B: Tensor) -> dict[str, float]:
    """See `summarize_offload`; and the share of the rows that the actor had to help with.

    Args:
        rows: the records (`OFFLOAD`) of a batch without verl's padding rows, which are copies of others.
        asked_B: bool `[B]`, the rows that the actor was asked for.
    """
    records = [OffloadRecord.from_row(row) for row in rows]
    metrics = summarize_offload(records)
    metrics["left_for_actor"] = asked_B.float().mean().item()
    for record in records:
        if record.attempts and record.status != Status.SCORED:
            name = f"fault/{Status(record.status).name.lower()}"
            metrics[name] = metrics.get(name, 0.0) + 1.0
    return metrics
