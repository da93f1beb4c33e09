"""verl's v1 trainers with token credit: a thin subclass of each of the three trainers, if it has what OAR needs.

At the start, a subclass checks that every node has the plugin. In each step it marks the rows to score, distributes
them evenly over the ranks, sends the request with the log-prob pass, and multiplies the host's advantage with the
gate's weights. Everything else is the host's. The subclasses replace verl's in its registry. If the estimator is not
`oar`, they build verl's own class, and the run does not use this file.
"""

import logging
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

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

from oar_plugin.credit.watch import Watch
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.verl.balancing import balanced_partitions
from oar_plugin.hosts.verl.handshake import check_nodes, no_importance
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS, OFFLOAD, actor_may_help, merged, offload_metrics, switch_on
from oar_plugin.hosts.verl.settings import STRATEGIES, resolve_here, switched_on
from oar_plugin.hosts.verl.viewer import QueuedBatch, Viewer
from oar_plugin.passes.request import FIELDS, IMPORTANCE, NEEDED, REQUEST, SECONDS, SEGMENTS, STATUS
from oar_plugin.token_credit import TokenCredit

if TYPE_CHECKING:
    from verl.single_controller.ray.base import RayWorkerGroup
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

logger = logging.getLogger("oar_plugin")


class OarTrainerMixin:
    """What OAR adds to a v1 trainer. Put it before the trainer in the list of bases."""

    host: ClassVar[type]
    """The trainer itself, which a run with another estimator gets."""

    # What the host's trainer provides.
    config: DictConfig
    global_steps: int
    timing_raw: dict[str, float]
    actor_rollout_wg: "RayWorkerGroup | ActorRolloutRefWorker"  # verl gives the group the methods of its workers
    llm_server_manager: "LLMServerManager"
    tokenizer: Any
    logger: Any

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
        servers: list[Any] = []
        manager: LLMServerManager | None
        replica: RolloutReplica
        for manager in (getattr(self, name, None) for name in ("llm_server_manager", "standalone_server_manager")):
            for replica in manager.get_replicas() if manager is not None else ():
                servers += replica.servers
        check_nodes(self.actor_rollout_wg.workers, servers, STRATEGIES[strategy])
        super().on_init_end()  # type: ignore[misc]

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()  # type: ignore[misc]
        # Ray runs the trainer on any node, in a folder of its own.
        home = self.config.trainer.default_local_dir
        self._credit = TokenCredit(self.oar, self.tokenizer, home=home, offloads=True)
        self._viewer = Viewer(self._credit)

    # ---- rows to score, distributed evenly over the ranks

    def _balance_batch(
        self, batch: tq.KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", **kwargs: Any
    ) -> Any:
        """Lets verl balance and pad the batch. If only some rows are to be scored, distributes the rows again."""
        sampled_at = {key: place for place, key in enumerate(batch.keys)}
        metrics["oar/lost_responses"] = lost_responses(batch.keys, self.config.actor_rollout_ref.rollout.n)
        batch = super()._balance_batch(batch, metrics, logging_prefix, **kwargs)  # type: ignore[misc]
        with marked_timer("oar", self.timing_raw):
            needed = dict(zip(batch.keys, self._mark_needed_rows(batch, metrics).tolist(), strict=True))
            if any(needed.values()) and not all(needed.values()):
                # A rank's mini-batches are consecutive rows. Restore verl's order: as sampled, then rows verl added.
                batch.reorder(sorted(range(len(batch)), key=lambda row: sampled_at.get(batch.keys[row], len(batch))))
                lengths = [tag["seq_len"] for tag in batch.tags]
                partitions = balanced_partitions(lengths, [needed[key] for key in batch.keys], self._ranks())
                batch.reorder([row for partition in partitions for row in partition])
                metrics.update(log_seqlen_unbalance(lengths, partitions, logging_prefix))
        return batch

    def _ranks(self) -> int:
        """Returns the number of the actor's data-parallel ranks."""
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

        # The old log-probs come from the rollout: no pass computes them. So importance needs a pass of its own.
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        with marked_timer("oar", self.timing_raw), self._requesting(batch, importance_only=True):
            temperature = self.config.actor_rollout_ref.rollout.temperature
            batch.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
            self.actor_rollout_wg.compute_log_prob(batch)
        return batch

    def _bypasses_log_probs(self) -> bool:
        correction = self.config.algorithm.get("rollout_correction", None)
        return bool(correction and correction.get("bypass_mode", False))

    @contextmanager
    def _requesting(self, batch: tq.KVBatchMeta, importance_only: bool) -> Iterator[None]:
        longest, temperature = self.config.data.max_response_length, self.config.actor_rollout_ref.rollout.temperature
        request = self._credit.request(self.global_steps, longest, temperature, importance_only)
        batch.extra_info[REQUEST] = request.to_dict()
        try:
            yield
        finally:
            # The reference pass of a LoRA actor goes through the same call; it must not score again.
            batch.extra_info.pop(REQUEST, None)

    def _mark_needed_rows(self, batch: Any, metrics: dict) -> torch.Tensor:
        """Writes `oar_needed`, the rows that the actor is to score, and returns it, bool `[B]`.

        If a row's advantage is exactly zero, weights cannot change its update. The host's own estimator computes the
        advantage from rewards alone, before log-probs exist. With KL in the reward, it is not known yet: every row is
        scored. Rows that the rollout engines have scored are not scored again.
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
        fields = _read(batch, "uid", "response_mask", "rm_scores").to_padded_tensor()
        fields["token_level_rewards"] = fields["token_level_scores"] = fields["rm_scores"]
        uid = np.array(fields.pop("uid").tolist(), dtype=object)
        algorithm = self.config.algorithm
        data = compute_advantage_for_multi_trajectories(
            DataProto(batch=fields, non_tensor_batch={"uid": uid}),
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
                raise RuntimeError(no_importance(self.global_steps))
            if self.oar.offloads:
                padded.update(merged(padded, asked_B, _padding_rows(batch), self.oar))
            status_B = padded[STATUS][:, 0]
            advantage_BL, importance_BL, segments_BL = (padded[name] for name in ("advantages", IMPORTANCE, SEGMENTS))
            reshaped = self._credit.reshape(self.global_steps, advantage_BL, importance_BL, segments_BL, status_B)
            _write(batch, "advantages", response_to_nested(reshaped.advantage_BL, mask))
            metrics.update({f"oar/{name}": value for name, value in reshaped.metrics.items()})
        if not self._bypasses_log_probs():  # in bypass mode, the driver's timer already has the whole pass
            self.timing_raw["oar"] += padded[SECONDS].sum().item() / self._ranks()
        read = partial(tq.kv_batch_get, partition_id=batch.partition_id)
        queued = QueuedBatch(batch.keys, ~_padding_rows(batch), asked_B, reshaped, read)
        metrics.update(self._viewer.show(queued, self.logger.logger))
        self.logger.logger.setdefault("oar_watch", _WatchingLogger(self._credit.watch))
        return batch

    @contextmanager
    def _base_estimator(self) -> Iterator[None]:
        """Sets the base estimator's name: verl spreads a session's advantage over its trajectories only for `grpo`."""
        self.config.algorithm.adv_estimator = self.oar.base_estimator
        try:
            yield
        finally:
            self.config.algorithm.adv_estimator = "oar"


class _WatchingLogger:
    """Among verl's loggers: passes the metrics of each step to OAR's watch."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def log(self, data: dict[str, Any], step: int) -> None:
        self._watch.see(step, data, data.get("critic/score/mean"))


def lost_responses(keys: Sequence[str], each: int) -> float:
    """Returns the share of missing responses; `each` are expected per prompt. Keys: `prompt_response_trajectory`.

    If a reward function fails or a request is lost, verl 0.9.1 silently continues with the rest of the group.
    """
    responses = {key.rsplit("_", 1)[0] for key in keys}
    prompts = {response.rsplit("_", 1)[0] for response in responses}
    return max(0.0, 1 - len(responses) / (each * len(prompts)))


def _read(batch: tq.KVBatchMeta, *fields: str) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def _write(batch: Any, name: str, field: torch.Tensor) -> None:
    fields = TensorDict({name: field}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _padding_rows(batch: Any) -> torch.Tensor:
    """bool `[B]`: rows that verl added to fill up the batch."""
    return torch.tensor([bool(tag.get("is_padding", False)) for tag in batch.tags])


def register() -> None:
    """Replace verl's trainers in its registry.

    `register_trainer` refuses an existing name. With a new name, users would have to change a second setting.
    """
    registry = trainer_base.TRAINER_REGISTRY
    for mode, trainer in capabilities.TRAINERS.items():
        if not capabilities.missing(mode):
            host = pkgutil.resolve_name(trainer)
            registry[mode] = capabilities.subclass(OarTrainerMixin, registry[mode], host, f"trainer '{mode}'")


register()  # at import, like verl's own decorators: either `plugin`'s hook or a program imports this module first
