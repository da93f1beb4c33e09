"""verl's v1 trainers with token credit: a thin subclass of each of its own three that fits.

At the start a subclass asks whether every node has the plugin. To a step it adds: mark the rows that matter and deal them out
evenly, send the request along with the log-prob pass, multiply the host's advantage with the gate's weights. Everything else is
the host's. The classes replace verl's in its registry, and build verl's own class unless the estimator is `oar`, so that no
other run goes through this file.
"""

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.utils.padding import response_to_nested

from oar_plugin.credit.answer import Segment
from oar_plugin.estimator import reshape
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.verl.balancing import balanced_partitions
from oar_plugin.hosts.verl.dump import Credited
from oar_plugin.hosts.verl.handshake import check_nodes
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS, OFFLOAD, actor_may_help, merged, offload_metrics, switch_on
from oar_plugin.hosts.verl.registration import subclass
from oar_plugin.hosts.verl.settings import STRATEGIES, resolve_here, switched_on
from oar_plugin.hosts.verl.viewer import Viewer
from oar_plugin.passes.request import (
    FIELDS,
    IMPORTANCE,
    NEEDED,
    REQUEST,
    SECONDS,
    SEGMENTS,
    STATUS,
    Request,
    replacement_token,
)

logger = logging.getLogger("oar_plugin")


class OarTrainerMixin:
    """What OAR adds to a v1 trainer. Put it before the trainer in the list of bases."""

    host: type
    """The trainer itself, which a run with another estimator gets."""

    config: DictConfig
    global_steps: int
    timing_raw: dict[str, float]
    actor_rollout_wg: Any
    tokenizer: Any
    logger: Any

    _replacement: int | None = None

    def __new__(cls, config: DictConfig) -> Any:
        return super().__new__(cls) if switched_on(config) else cls.host(config)

    def __init__(self, config: DictConfig) -> None:
        self.oar = resolve_here(config)
        if self.oar.offloads:
            switch_on(config, self.oar)
        super().__init__(config)  # type: ignore[call-arg]
        logger.info("OAR is on: %s", self.oar)

    def on_init_end(self) -> None:
        strategy = self.config.actor_rollout_ref.actor.strategy
        managers = (getattr(self, name, None) for name in ("llm_server_manager", "standalone_server_manager"))
        replicas = [replica for manager in managers if manager is not None for replica in manager.get_replicas()]
        servers = [server for replica in replicas for server in replica.servers]
        check_nodes(self.actor_rollout_wg.workers, servers, STRATEGIES[strategy])
        super().on_init_end()  # type: ignore[misc]

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()  # type: ignore[misc]
        self._replacement = replacement_token(self.oar, self.tokenizer)
        self._viewer = Viewer(self.oar, self.tokenizer, self.config.trainer.default_local_dir)

    # ---- the rows that matter, dealt out evenly

    def _balance_batch(self, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", **kwargs: Any) -> Any:
        """verl's own, which also fills up the batch; then its rows are dealt out anew where only some are to be scored."""
        stood = {key: place for place, key in enumerate(batch.keys)}
        metrics["oar/lost_responses"] = lost_responses(batch.keys, self.config.actor_rollout_ref.rollout.n)
        batch = super()._balance_batch(batch, metrics, logging_prefix, **kwargs)  # type: ignore[misc]
        with marked_timer("oar", self.timing_raw):
            needed = dict(zip(batch.keys, self._mark_needed_rows(batch, metrics).tolist(), strict=True))
            if any(needed.values()) and not all(needed.values()):
                # A rank's mini-batches are consecutive rows. As in verl these stand as they were sampled, fillers behind them.
                batch.reorder(sorted(range(len(batch)), key=lambda row: stood.get(batch.keys[row], len(batch))))
                lengths = [tag["seq_len"] for tag in batch.tags]
                partitions = balanced_partitions(lengths, [needed[key] for key in batch.keys], self._ranks())
                batch.reorder([row for partition in partitions for row in partition])
                metrics.update(log_seqlen_unbalance(lengths, partitions, logging_prefix))
        return batch

    def _ranks(self) -> int:
        """Data-parallel ranks of the actor."""
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    # ---- importance, with the log-prob pass

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        if self.oar.offloads and not _read(batch, NEEDED)[NEEDED].values().any():  # the engines have scored everything
            return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        if not self._bypasses_log_probs():
            with self._requesting(batch, importance_only=False):
                result = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
            result.extra_info.pop(REQUEST, None)
            return result

        # Old log-probs are the rollout's: no pass to ride on, so importance has its own.
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        with marked_timer("oar", self.timing_raw), self._requesting(batch, importance_only=True):
            batch.extra_info.update(
                calculate_entropy=False,
                compute_loss=False,
                temperature=self.config.actor_rollout_ref.rollout.temperature,
            )
            self.actor_rollout_wg.compute_log_prob(batch)
        return batch

    def _bypasses_log_probs(self) -> bool:
        correction = self.config.algorithm.get("rollout_correction", None)
        return bool(correction and correction.get("bypass_mode", False))

    @contextmanager
    def _requesting(self, batch: Any, importance_only: bool) -> Iterator[None]:
        request = Request.from_config(
            self.oar,
            self.global_steps,
            self.config.data.max_response_length,
            importance_only,
            self._replacement,
            self.config.actor_rollout_ref.rollout.temperature,
        )
        batch.extra_info[REQUEST] = request.to_dict()
        try:
            yield
        finally:
            # The reference pass of a LoRA actor goes through the same call; it must not score again.
            batch.extra_info.pop(REQUEST, None)

    def _mark_needed_rows(self, batch: Any, metrics: dict) -> torch.Tensor:
        """Write `oar_needed`, the rows that the actor is to score, and return it, bool `[B]`.

        Rows whose advantage is exactly zero learn nothing from any weight. The advantage is the host's own, on rewards
        alone, before log-probs exist. With KL in the reward it is not known yet, and every row is scored. Rows that the
        rollout engines have scored are done.
        """
        needed_B = self._rows_with_an_advantage(batch)
        if self.oar.offloads:
            data = _read(batch, ENGINE_FIELDS[STATUS], OFFLOAD)
            own_B = ~_padding_rows(batch)
            status_B = torch.cat(data[ENGINE_FIELDS[STATUS]].unbind())
            needed_B &= own_B & actor_may_help(status_B) & (self.oar.actor_importance is not None)
            rows = [row for row, own in zip(data[OFFLOAD].unbind(), own_B.tolist(), strict=True) if own]
            metrics.update({f"oar/offload/{name}": v for name, v in offload_metrics(rows, needed_B).items()})
        _write(batch, NEEDED, torch.nested.as_nested_tensor(list(needed_B.long()[:, None]), layout=torch.jagged))
        return needed_B

    def _rows_with_an_advantage(self, batch: Any) -> torch.Tensor:
        if self.config.algorithm.use_kl_in_reward:
            return ~_padding_rows(batch)
        data = DataProto(batch=_read(batch, "uid", "response_mask", "rm_scores").to_padded_tensor())
        data.batch["token_level_rewards"] = data.batch["token_level_scores"] = data.batch["rm_scores"]
        data.non_tensor_batch["uid"] = np.array(data.batch.pop("uid").tolist(), dtype=object)
        algorithm = self.config.algorithm
        data = compute_advantage_for_multi_trajectories(
            data,
            batch_keys=batch.keys,
            adv_estimator=self.oar.base_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
        return (data.batch["advantages"] != 0).any(-1)

    # ---- the host's advantage, times the weights

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        with self._base_estimator():
            batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        with marked_timer("oar", self.timing_raw):
            of_engines = ENGINE_FIELDS.values() if self.oar.offloads else ()
            data = _read(batch, "advantages", NEEDED, *FIELDS, *of_engines)
            mask = data["advantages"]
            padded = data.to_padded_tensor()
            asked_B = padded[NEEDED][:, 0] > 0
            if IMPORTANCE not in padded and (asked_B.any() or not self.oar.offloads):
                raise RuntimeError(
                    f"step {self.global_steps}: the actor was asked for token importance and returned none. Its workers do not "
                    "run oar_plugin's engine; `oar doctor` on their nodes says what they have"
                )
            if self.oar.offloads:
                padded.update(merged(padded, asked_B, _padding_rows(batch), self.oar))
            reshaped = reshape(
                padded["advantages"],
                padded[IMPORTANCE],
                padded[SEGMENTS] == Segment.REASONING,
                padded[STATUS][:, 0],
                self.oar,
            )
            _write(batch, "advantages", response_to_nested(reshaped.advantage_BL, mask))
            metrics.update({f"oar/{name}": value for name, value in reshaped.metrics.items()})
        if not self._bypasses_log_probs():  # there, the driver's clock has seen the whole pass
            self.timing_raw["oar"] += padded[SECONDS].sum().item() / self._ranks()
        read = partial(tq.kv_batch_get, partition_id=batch.partition_id)
        credited = Credited(self.global_steps, batch.keys, ~_padding_rows(batch), padded, reshaped, read)
        metrics.update(self._viewer.show(credited, self.logger.logger))
        return batch

    @contextmanager
    def _base_estimator(self) -> Iterator[None]:
        """verl spreads a session's advantage over its trajectories for `grpo` only, by name: let it see the base's."""
        self.config.algorithm.adv_estimator = self.oar.base_estimator
        try:
            yield
        finally:
            self.config.algorithm.adv_estimator = "oar"


def lost_responses(keys: Sequence[str], each: int) -> float:
    """Share of the responses that are not there, of `each` to every prompt; keys are `prompt_response_trajectory`.

    verl 0.9.1 goes on with what a group has when a reward raises, or when requests are lost on their way, and says nothing.
    """
    responses = {key.rsplit("_", 1)[0] for key in keys}
    prompts = {response.rsplit("_", 1)[0] for response in responses}
    return max(0.0, 1 - len(responses) / (each * len(prompts)))


def _read(batch: Any, *fields: str) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def _write(batch: Any, name: str, field: torch.Tensor) -> None:
    fields = TensorDict({name: field}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _padding_rows(batch: Any) -> torch.Tensor:
    """bool `[B]`: rows that verl added to fill up the batch."""
    return torch.tensor([bool(tag.get("is_padding", False)) for tag in batch.tags])


def register() -> None:
    """Replace verl's trainers in its registry.

    `register_trainer` refuses a taken name, and a name of our own would be a second line for the user to write.
    """
    for mode, (module, name) in capabilities.TRAINERS.items():
        if not capabilities.missing(mode):
            host, registry = getattr(importlib.import_module(module), name), trainer_base.TRAINER_REGISTRY
            registry[mode] = subclass(OarTrainerMixin, registry[mode], host, f"trainer '{mode}'")
