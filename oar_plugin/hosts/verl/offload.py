"""OAR-P on the rollout engines, as the driver sees it: is it possible here, switch it on, read what came back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.request import IMPORTANCE, REPORT, SEGMENTS
from oar_plugin.hosts.verl.offload_record import OFFLOAD, OffloadRecord, summarize_offload
from oar_plugin.hosts.vllm.versions import installed, unsupported

logger = logging.getLogger("oar_plugin")

MANAGER = "oar_plugin.hosts.verl.agent_loop.OarAgentLoopManager"
FIELDS = (IMPORTANCE, SEGMENTS, REPORT)

ACTOR_MAY_HELP = (
    Status.NOT_NEEDED,  # rewards are equal, and yet the advantage is not zero: the base normalises over the batch
    Status.NOT_SCORED,
    Status.NON_FINITE,
    Status.TIMED_OUT,
    Status.TOO_LONG,
    Status.ABORTED,
    Status.ENGINE_FAILED,
)
"""What the engines say of a response that the actor can still score (`perturbation.fallback=fisher`)."""

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


class Offloaded:
    """What the engines returned for a batch.

    Args:
        keys: of the batch's rows.
        data: the fields FIELDS and `oar_offload` of those rows.
        padding: rows that verl added to fill up the batch. They are copies of others, importance and all.
    """

    def __init__(self, keys: Sequence[str], data: TensorDict, padding: Sequence[bool]) -> None:
        rows = {name: data[name].unbind() for name in (*FIELDS, OFFLOAD)}
        self.records = {}
        self._fields = {}
        for index, key in enumerate(keys):
            if not padding[index]:
                self.records[key] = OffloadRecord.from_row(rows[OFFLOAD][index])
                self._fields[key] = {name: rows[name][index] for name in FIELDS}

    def left_for_actor(self, keys: Sequence[str]) -> Tensor:
        """bool `[B]`: rows that the actor may still score."""
        return torch.tensor([key in self.records and self.records[key].status in ACTOR_MAY_HELP for key in keys])

    def merge(self, keys: Sequence[str], like: Tensor, asked: Collection[str], data: TensorDict) -> TensorDict:
        """The three fields of each row: the actor's where it was asked, the engines' elsewhere.

        Args:
            keys: of the rows, in the batch's present order.
            like: a nested tensor as long as the responses.
            asked: keys of the rows that the actor was to score.
            data: the fields as they are now; the actor has written over those of *all* rows if it was asked for any.
        """
        merged: dict[str, list[Tensor]] = {name: [] for name in FIELDS}
        now = {name: data[name].unbind() for name in FIELDS}
        for index, (key, row) in enumerate(zip(keys, like.unbind(), strict=True)):
            if key in asked:
                fields = {name: now[name][index] for name in FIELDS}
            else:
                fields = self._fields.get(key) or _unscored(len(row), Status.NOT_NEEDED)
            for name in FIELDS:
                merged[name].append(fields[name])
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in merged.items()}
        return TensorDict(nested, batch_size=len(keys))

    def metrics(self, asked_B: Tensor) -> dict[str, float]:
        """See `summarize_offload`; and the share of the rows that the actor had to help with."""
        metrics = summarize_offload(list(self.records.values()))
        metrics["left_for_actor"] = asked_B.float().mean().item()
        for record in self.records.values():
            if record.attempts and record.status != Status.SCORED:
                name = f"fault/{Status(record.status).name.lower()}"
                metrics[name] = metrics.get(name, 0.0) + 1.0
        return metrics


def _unscored(length: int, status: Status) -> dict[str, Tensor]:
    return {
        IMPORTANCE: torch.zeros(length),
        SEGMENTS: torch.zeros(length, dtype=torch.int8),
        REPORT: torch.tensor([float(status), 0.0]),
    }
