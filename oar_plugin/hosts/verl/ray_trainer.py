"""verl's `RayPPOTrainer` with token credit: `trainer.use_v1=False`, and the trainers of `verl.experimental`.

There is no registry of these trainers. So the class replaces verl's in its module, right after the module's import; verl's own
subclasses then derive from it. The trainer of a run with another estimator calls only verl's methods. `verl.trainer.ppo.v1` has
a registry, and a module of ours (`trainer`). This one can go when verl has no `RayPPOTrainer`.

verl's advantage function calls the estimator `oar`, which returns the base estimator's advantage. The weights are multiplied
with it before the update.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.utils.padding import left_right_2_no_padding

from oar_plugin.config import OarConfig
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.verl.balancing import balanced_partitions
from oar_plugin.hosts.verl.handshake import check_nodes, no_importance
from oar_plugin.hosts.verl.settings import RAY_TRAINER, STRATEGIES, resolve_here, switched_on
from oar_plugin.hosts.verl.viewer import QueuedBatch, Viewer
from oar_plugin.passes.request import FIELDS, IMPORTANCE, NEEDED, REQUEST, SEGMENTS
from oar_plugin.token_credit import ReshapedBatch, TokenCredit

if TYPE_CHECKING:
    from verl.single_controller.ray.base import RayWorkerGroup
    from verl.workers.engine_workers import ActorRolloutRefWorker

SAMPLED_AT = "oar_sampled_at"  # field: int64, the row of the batch before verl balances it


class OarRayTrainer:
    """What OAR adds to a `RayPPOTrainer`. Put it before the trainer in the list of bases."""

    oar: OarConfig | None = None  # None: another estimator
    running: OarConfig | None = None  # settings of the trainer of this process, for the estimator

    # What the host's trainer provides.
    global_steps: int
    tokenizer: Any
    actor_rollout_wg: "RayWorkerGroup | ActorRolloutRefWorker"  # verl gives the group the methods of its workers

    @property
    def config(self) -> DictConfig:
        """The run's configuration. Some of verl's trainers do not call the base's `__init__`, but all set this."""
        return self._config

    @config.setter
    def config(self, config: DictConfig) -> None:
        self._config = config
        if switched_on(config) and self.oar is None:
            self.oar = OarRayTrainer.running = resolve_here(config, RAY_TRAINER)
            self._credit: TokenCredit | None = None

    def _start(self) -> TokenCredit:
        """Checks the nodes and reads the tokenizer, before the first pass."""
        if self._credit is None:
            assert self.oar is not None
            check_nodes(self.actor_rollout_wg.workers, [], STRATEGIES[self.config.actor_rollout_ref.actor.strategy])
            self._credit = TokenCredit(self.oar, self.tokenizer, home=self.config.trainer.default_local_dir)
            self._viewer = Viewer(self._credit)
        return self._credit

    # ---- rows to score, distributed evenly over the ranks

    def _balance_batch(
        self, batch: DataProto, metrics: dict, logging_prefix: str = "global_seqlen", **kwargs: Any
    ) -> None:
        """Lets verl balance the batch. If only some rows are to be scored, distributes the rows again."""
        if self.oar is None or self.use_prefix_grouper or "rm_scores" not in batch.batch:
            return super()._balance_batch(batch, metrics, logging_prefix, **kwargs)  # type: ignore[misc]
        batch.batch[SAMPLED_AT] = torch.arange(len(batch))
        super()._balance_batch(batch, metrics, logging_prefix, **kwargs)  # type: ignore[misc]
        sampled_at = batch.batch.pop(SAMPLED_AT)
        needed = self._needed_rows(batch)
        if needed.any() and not needed.all() and not kwargs.get("keep_minibatch"):
            # A rank's mini-batches are consecutive rows, so the rows are distributed from the order of sampling.
            batch.reorder(sampled_at.argsort())
            needed = needed[sampled_at.argsort()]
            lengths = batch.batch["attention_mask"].sum(-1).tolist()
            partitions = balanced_partitions(lengths, needed.tolist(), self._ranks())
            batch.reorder(torch.tensor([row for partition in partitions for row in partition]))
            metrics.update(log_seqlen_unbalance(lengths, partitions, logging_prefix))
        return None

    def _needed_rows(self, batch: DataProto) -> Tensor:
        """Rows whose advantage is not zero, bool `[B]`: only there can weights change the update.

        The base estimator computes the advantage from rewards alone. With KL in the reward, it is not known before the
        log-probs: every row is scored.
        """
        if self.config.algorithm.use_kl_in_reward:
            return torch.ones(len(batch), dtype=torch.bool)
        advantage_BL, _ = base_advantage(
            token_level_rewards=batch.batch["rm_scores"],
            response_mask=batch.batch["response_mask"],
            index=batch.non_tensor_batch["uid"],
            config=self.config.algorithm,
        )
        return (advantage_BL != 0).any(-1)

    # ---- importance, with the log-prob pass

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        if self.oar is None:
            return super()._compute_old_log_prob(batch)  # type: ignore[misc]
        with self._asking(batch) as asking, _by_value(self):
            result, *others = super()._compute_old_log_prob(batch)  # type: ignore[misc]
        self._entropy_BL = result.batch.get("entropys")
        result.batch.update(asking.answer)
        return result, *others

    @contextmanager
    def _asking(self, batch: DataProto, importance_only: bool = False) -> Iterator["_Asking"]:
        """The actor's workers, which also score the rows of the next log-prob pass."""
        credit = self._start()
        longest, temperature = self.config.data.max_response_length, self.config.actor_rollout_ref.rollout.temperature
        request = credit.request(self.global_steps, longest, temperature, importance_only)
        workers = self.actor_rollout_wg
        asking = _Asking(workers, self._needed_rows(batch), request.to_dict(), self.global_steps)
        self.actor_rollout_wg = asking  # type: ignore[assignment]
        try:
            yield asking
        finally:
            self.actor_rollout_wg = workers

    def _score_alone(self, batch: DataProto) -> None:
        """In bypass mode the log-probs come from the rollout. No pass computes them, so importance needs its own."""
        self._entropy_BL = None
        with self._asking(batch, importance_only=True) as asking:
            data = left_right_2_no_padding(batch.to_tensordict())
            tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
            asking.compute_log_prob(data)
        batch.batch.update(asking.answer)

    # ---- the host's advantage, times the weights

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self.oar is None:
            return super()._update_actor(batch)  # type: ignore[misc,no-any-return]
        started, alone = time.perf_counter(), IMPORTANCE not in batch.batch
        if alone:
            self._score_alone(batch)
        importance_BL, segments_BL, status_B1, seconds_B1 = (batch.batch.pop(name) for name in FIELDS)
        credit = self._start()
        reshaped = credit.reshape(
            self.global_steps, batch.batch["advantages"], importance_BL, segments_BL, status_B1[:, 0]
        )
        batch.batch["advantages"] = reshaped.advantage_BL
        metrics = {f"oar/{name}": value for name, value in reshaped.metrics.items()}
        metrics["timing_s/oar"] = time.perf_counter() - started
        if not alone:  # the pass ran before this clock
            metrics["timing_s/oar"] += seconds_B1.sum().item() / self._ranks()
        metrics.update(self._viewer.show(self._queued(batch, reshaped), {}))
        credit.watch.see(self.global_steps, metrics, batch.batch["token_level_scores"].sum(-1).mean().item())
        result = super()._update_actor(batch)  # type: ignore[misc]
        result.meta_info["metrics"].update({name: [value] for name, value in metrics.items()})
        return result  # type: ignore[no-any-return]

    def _ranks(self) -> int:
        """Returns the number of the actor's data-parallel ranks."""
        return self._get_dp_size(self.actor_rollout_wg, "actor")  # type: ignore[attr-defined,no-any-return]

    def _queued(self, batch: DataProto, reshaped: ReshapedBatch) -> QueuedBatch:
        """The batch as the viewer reads it, from verl's padded one."""
        counts, keys = Counter[str](), list[str]()
        for uid in batch.non_tensor_batch["uid"]:
            keys.append(f"{uid}_{counts[uid]}_0")
            counts[uid] += 1
        row_of = {key: row for row, key in enumerate(keys)}
        tensors = {**batch.batch, **({} if self._entropy_BL is None else {"entropy": self._entropy_BL})}
        real_BT = batch.batch["attention_mask"].bool()
        prompt = batch.batch["prompts"].shape[1]

        def read(keys: Sequence[str], select_fields: Sequence[str]) -> Any:
            rows = [row_of[key] for key in keys]
            fields: dict[str, Any] = {}
            for name in select_fields:
                if name in tensors:
                    keep_BT = real_BT[:, :prompt] if name == "prompts" else real_BT[:, prompt:]
                    fields[name] = nested([tensors[name][row][keep_BT[row]] for row in rows])
                elif name in batch.non_tensor_batch:
                    fields[name] = batch.non_tensor_batch[name][rows]
            return fields

        everything_B = torch.ones(len(keys), dtype=torch.bool)
        return QueuedBatch(keys, everything_B, everything_B, reshaped, read)


class _Asking:
    """A worker group whose `compute_log_prob` also asks for importance. `answer`: the fields of the last call, padded."""

    answer: dict[str, Tensor]

    def __init__(self, workers: Any, needed_B: Tensor, request: dict[str, Any], step: int) -> None:
        self._workers, self._needed_B, self._request, self._step = workers, needed_B, request, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        asked = data.clone(recurse=False)  # verl still needs the padded fields
        width = data["responses"].shape[1]
        real_BL = data["attention_mask"][:, -width:].bool()
        for name in ("responses", "response_mask"):
            asked[name] = nested([row[real] for row, real in zip(data[name], real_BL, strict=True)])
        asked[NEEDED] = self._needed_B.long()[:, None]
        tu.assign_non_tensor(asked, **{REQUEST: self._request})
        output: TensorDict = self._workers.compute_log_prob(asked)
        if IMPORTANCE not in output:
            raise RuntimeError(no_importance(self._step))
        self.answer = {name: output.pop(name).to_padded_tensor(0) for name in FIELDS}
        for name in (IMPORTANCE, SEGMENTS):
            self.answer[name] = pad(self.answer[name], (0, width - self.answer[name].shape[1]))
        return output


@contextmanager
def _by_value(trainer: Any) -> Iterator[None]:
    """The trainer with a data plane that sends fields. `neoproto`, of verl's branch `neo`, sends references to fields, and its
    workers fetch and return only those that verl lists.
    """
    if hasattr(trainer, "data_plane"):
        plane = trainer.data_plane
        trainer.data_plane = ray_trainer.build_data_plane(OmegaConf.create({"trainer": {"data_plane": "classic"}}))
        trainer.data_plane.data_proto_cls = plane.data_proto_cls
        try:
            yield
        finally:
            trainer.data_plane = plane
    else:
        yield


def base_advantage(**given: Any) -> Any:
    """Returns the base estimator's advantages and returns `[B, L]`, from the arguments of verl's estimators."""
    assert OarRayTrainer.running is not None
    estimator = core_algos.get_adv_estimator_fn(OarRayTrainer.running.base_estimator)
    given["norm_adv_by_std_in_grpo"] = given["config"].get("norm_adv_by_std_in_grpo", True)
    return estimator(**capabilities.accepted(estimator, **given))


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def register() -> None:
    """Puts a subclass in the place of verl's trainer. Ray sends classes by name, so the subclass has the name of the place."""
    host = ray_trainer.RayPPOTrainer
    if not issubclass(host, OarRayTrainer):
        name = {"__module__": host.__module__, "__qualname__": host.__qualname__}
        ray_trainer.RayPPOTrainer = type(host.__name__, (OarRayTrainer, host), name)


register()  # at import, by `plugin`'s hook
