"""verl's v1 trainers with token credit: a thin subclass of each of the three trainers, if it has what OAR needs.

At the start, a subclass checks that every node has the plugin. In each step it marks the rows to score, distributes
them evenly over the ranks, sends the request with the log-prob pass, and multiplies the host's advantage with the
gate's weights. Everything else is the host's. The subclasses replace verl's in its registry. If the estimator is not
`oar`, they build verl's own class, and the run does not use this file.
"""

import pkgutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.debug import marked_timer

from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import rewarded, weighted
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.verl.offload import ACTOR_MAY_HELP, ENGINE_FIELDS, OFFLOAD, merged, offload_metrics, switch_on
from oar_plugin.hosts.verl.settings import draw_seed, resolve, switched_on
from oar_plugin.hosts.verl.trainer_credit import TrainerCredit, answer_mismatch, needs_credit, no_importance
from oar_plugin.hosts.verl.viewer import QueuedBatch, show
from oar_plugin.output import logger
from oar_plugin.passes.gradient import Packed
from oar_plugin.passes.request import CHOSEN, MEASURES, NEEDED, REQUEST, SECONDS, STATUS, USED, WEIGHTS, nested


class OarTrainerMixin(TrainerCredit):
    """What OAR adds to a v1 trainer. Put it before the trainer in the list of bases."""

    host: ClassVar[type]  # the trainer itself, which a run with another estimator gets

    # What the host's trainer provides.
    timing_raw: dict[str, float]
    logger: Any
    agent_loop_manager: Any

    def __new__(cls, config: DictConfig) -> Any:
        return super().__new__(cls) if switched_on(config) else cls.host(config)

    def __init__(self, config: DictConfig) -> None:
        draw_seed(config)
        self.oar = resolve(config, here=True)
        if self.oar.offloads:
            switch_on(config, self.oar)
        super().__init__(config)  # type: ignore[call-arg]
        logger.info("OAR is on: %s", self.oar)

    def on_init_end(self) -> None:
        names = "llm_server_manager", "standalone_server_manager"
        managers = [manager for name in names if (manager := getattr(self, name, None)) is not None]
        servers = [server for manager in managers for replica in manager.get_replicas() for server in replica.servers]
        self._check_nodes(self.oar, servers)
        super().on_init_end()  # type: ignore[misc]

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()  # type: ignore[misc]
        self._make_credit(self.oar)

    def _balance_batch(
        self, batch: tq.KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", **kwargs: Any
    ) -> Any:
        """Lets verl balance and pad the batch. If only some rows are to be scored, distributes the rows again."""
        sampled_at = {key: place for place, key in enumerate(batch.keys)}
        metrics["oar/lost_responses"] = lost_responses(batch.keys, self.config.actor_rollout_ref.rollout.n)
        batch = super()._balance_batch(batch, metrics, logging_prefix, **kwargs)  # type: ignore[misc]
        if self._warms_up():
            return batch
        with marked_timer("oar", self.timing_raw):
            needed = self._mark_needed_rows(batch, metrics)
            places = [sampled_at.get(key, len(batch)) for key in batch.keys]  # rows that verl added come last
            lengths = [tag["seq_len"] for tag in batch.tags]
            if (order := self._even_order(places, lengths, needed, metrics, logging_prefix)) is not None:
                batch.reorder(order)
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        # Without an update nothing is scored; and the engines may have scored everything.
        if self._warms_up() or (self.oar.offloads and not _read(batch, NEEDED)[NEEDED].values().any()):
            return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        alone = self._bypasses_log_probs()
        request = {REQUEST: self._request(alone)}
        batch.extra_info |= {} if alone else request
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        if alone:  # old log-probs are the rollout's, and no pass computes them: importance needs a pass of its own
            with marked_timer("oar", self.timing_raw):
                temperature = self.config.actor_rollout_ref.rollout.temperature
                given = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
                batch.extra_info |= request | given
                self.actor_rollout_wg.compute_log_prob(batch)
        # The reference pass of a LoRA actor goes through the same call; it must not score again.
        batch.extra_info.pop(REQUEST, None)
        return batch

    def _bypasses_log_probs(self) -> bool:
        return bool(OmegaConf.select(self.config, "algorithm.rollout_correction.bypass_mode"))

    def _mark_needed_rows(self, batch: Any, metrics: dict) -> list[int]:
        """Writes `oar_needed`, the rows that the actor is to score: none that engines have scored. Returns its values."""
        needed_B = self._needs_credit(batch)
        if self.oar.offloads:
            own_B, record_BN = ~_padding_rows(batch), torch.stack(_read(batch, OFFLOAD)[OFFLOAD].unbind())
            status_B = record_BN[:, 0].long()  # before the gate, which the actor has too
            helps_B = torch.isin(status_B, ACTOR_MAY_HELP) & (self.oar.actor_importance is not None)
            if self.oar.amortize.share is not None:  # it learns from the engines' scores
                helps_B |= status_B == Status.SCORED
            needed_B &= own_B & helps_B
            of_offload = offload_metrics(record_BN[own_B], needed_B & (status_B != Status.SCORED))
            metrics.update({f"oar/offload/{name}": value for name, value in of_offload.items()})
        marked_B = needed_B.long()
        if self.oar.amortize.share is not None and not self.oar.offloads:
            fields: Any = _read(batch, "input_ids", "response_mask")
            input_ids, own_B = fields["input_ids"], _own_tokens(fields["response_mask"])
            packed = Packed(input_ids.values(), torch.zeros_like(input_ids.values()), input_ids.offsets())
            marked_B = self._needed_or_chosen(needed_B & ~_padding_rows(batch), packed, own_B)
            marked_B = torch.maximum(marked_B, needed_B.long())
        _write(batch, NEEDED, nested(marked_B[:, None]))
        return marked_B.tolist()

    def _needs_credit(self, batch: Any) -> torch.Tensor:
        """Which rows need credit, bool `[B]`, by the advantage from rewards alone; with KL in the reward, all of them."""
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
        # All trajectories of a session have its reward. A prompt's only session has no others to be equal to.
        sessions = {key.rsplit("_", 1)[0] for key in batch.keys}
        number = Counter(session.rsplit("_", 1)[0] for session in sessions)
        groups = [key if number[prompt := key.rsplit("_", 2)[0]] == 1 else prompt for key in batch.keys]
        return needs_credit(self.oar, data.batch["advantages"], fields["rm_scores"], groups)

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        # verl spreads a session's advantage over its trajectories only for an estimator named `grpo`.
        self.config.algorithm.adv_estimator = self.oar.base_estimator
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        self.config.algorithm.adv_estimator = "oar"
        if self._warms_up():
            return batch
        with marked_timer("oar", self.timing_raw):
            of_engines = [ENGINE_FIELDS[name] for name in (WEIGHTS, STATUS, MEASURES)]
            data: Any = _read(batch, "advantages", "rm_scores", NEEDED, *USED, *of_engines)
            needed_B = data[NEEDED].values().flatten()
            asked_B = by_actor_B = needed_B != 0
            if WEIGHTS not in data and (asked_B.any() or not self.oar.offloads):
                raise RuntimeError(no_importance(self.global_steps))
            weights: Any
            if self.oar.offloads:
                weights, status_B, measure_B4 = merged(data, asked_B, _padding_rows(batch))
            else:
                weights, status_B, by_actor_B = data[WEIGHTS], data[STATUS].values(), torch.ones_like(asked_B)
                measure_B4 = data[MEASURES].values().view(len(status_B), -1)
            own_B, advantage_BL = ~_padding_rows(batch), data["advantages"].to_padded_tensor(0.0)
            status_B = torch.where(own_B, rewarded(status_B, advantage_BL), status_B)
            first = not getattr(self, "local_trigger_step", 0)  # of a step's batches in `separate_async`
            self._count(metrics, measure_B4, status_B, data["rm_scores"].to_padded_tensor(0.0)[own_B], first)
            chosen_B = needed_B == CHOSEN
            if self.oar.offloads and self.oar.amortize.share is not None:
                of_engines_B = data[ENGINE_FIELDS[STATUS]].values().flatten()
                chosen_B = asked_B & ((of_engines_B == Status.SCORED) | (of_engines_B == Status.CONSTANT))
            self._learned(metrics, chosen_B, status_B, data["advantages"].offsets().diff())
            if chosen_B.any() and self.oar.offloads:
                share = self._choice.share_of(data["advantages"].offsets().diff()[asked_B])
                for worker in self.agent_loop_manager.agent_loop_workers:
                    worker.oar_share.remote(share)
            if not data["advantages"].offsets().equal(weights.offsets()):
                raise RuntimeError("verl changed the lengths of responses after importance was computed")
            product = weighted(data["advantages"].values(), weights.values())
            advantages = torch.nested.nested_tensor_from_jagged(product, weights.offsets())
        if SECONDS in data and not self._bypasses_log_probs():  # in bypass mode, the driver's timer has the whole pass
            self.timing_raw["oar"] += data[SECONDS].values().sum().item() / self._ranks()
        read = partial(tq.kv_batch_get, partition_id=batch.partition_id)
        queued = QueuedBatch(self.global_steps, batch.keys, own_B, by_actor_B, status_B, read)
        metrics.update(show(self._credit, queued, self.logger.logger))  # while the queue has the host's own advantages
        with marked_timer("oar", self.timing_raw):
            metrics.update(answer_mismatch(self._credit, queued))
            _write(batch, "advantages", advantages)
        return batch


def lost_responses(keys: Sequence[str], each: int) -> float:
    """Returns the share of missing responses; `each` are expected per prompt. Keys: `prompt_response_trajectory`.

    If a reward function fails or a request is lost, verl 0.9.1 silently continues with the rest of the group.
    """
    responses = {key.rsplit("_", 1)[0] for key in keys}
    prompts = {response.rsplit("_", 1)[0] for response in responses}
    return max(0.0, 1 - len(responses) / (each * len(prompts)))


def _read(batch: tq.KVBatchMeta, *fields: str) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def _own_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Number of true values of each row of a nested tensor, `[B]`."""
    return torch.stack([row.sum() for row in mask.unbind()])


def _write(batch: Any, name: str, field: torch.Tensor) -> None:
    fields = TensorDict({name: field}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _padding_rows(batch: Any) -> torch.Tensor:
    """bool `[B]`: rows that verl added to fill up the batch."""
    return torch.tensor([bool(tag.get("is_padding", False)) for tag in batch.tags])


def register() -> None:
    """Replace verl's trainers in its registry. `register_trainer` wants a new name, which users would have to set as well."""
    registry = trainer_base.TRAINER_REGISTRY
    for mode, trainer in capabilities.TRAINERS.items():
        if not capabilities.missing(mode):
            host = pkgutil.resolve_name(trainer)
            registry[mode] = capabilities.subclass(OarTrainerMixin, registry[mode], host, f"trainer '{mode}'")


register()  # at import, like verl's own decorators: either `plugin`'s hook or a program imports this module first
