"""verl's `RayPPOTrainer` with token credit: `trainer.use_v1=False`, and the trainers of `verl.experimental`.

There is no registry of these trainers. So the class replaces verl's in its module, right after the module's import; verl's own
subclasses then derive from it. The trainer of a run with another estimator calls only verl's methods.

verl's advantage function calls the estimator `oar`, which returns the base estimator's advantage. The weights are multiplied
with it before the update.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import rewarded, weighted
from oar_plugin.hosts.verl import capabilities
from oar_plugin.hosts.verl.settings import draw_seed, parsed, resolve, switched_on
from oar_plugin.hosts.verl.trainer_credit import TrainerCredit, answer_mismatch, needs_credit, no_importance
from oar_plugin.hosts.verl.viewer import padded_batch, show
from oar_plugin.passes.gradient import Packed
from oar_plugin.passes.request import (
    CHOSEN,
    FIELDS,
    MEASURES,
    NEEDED,
    REQUEST,
    SECONDS,
    SEGMENTS,
    SHOWN,
    STATUS,
    USED,
    WEIGHTS,
)

SAMPLED_AT = "oar_sampled_at"  # field: int64, the row of the batch before verl balances it
ENTROPY = "oar_entropy"  # field of the log-prob pass, for dumps. verl drops its own
LATE = 0.05  # of the largest advantage: by how much that of a row may exceed what its scores give. Less is rounding
UNUSED = 8  # advantages before the first update; with `trainer.critic_warmup`, one more for each of its steps
OURS = (*FIELDS, NEEDED, ENTROPY)
RESHAPED = "oar_reshaped"  # in a batch's `meta_info`: its advantages have the weights already


class OarRayTrainer(TrainerCredit):
    """What OAR adds to a `RayPPOTrainer`. Put it before the trainer in the list of bases."""

    oar: OarConfig | None = None  # None: another estimator
    running = False  # whether this process has such a trainer with OAR
    unused = 0  # advantages that the estimator has returned since the process has started, until the first is weighted

    @property
    def config(self) -> DictConfig:
        """The run's configuration. Some of verl's trainers do not call the base's `__init__`, but all set this."""
        return self._config

    @config.setter
    def config(self, config: DictConfig) -> None:
        self._config = config
        if switched_on(config) and self.oar is None:
            draw_seed(config)
            set_v1 = OmegaConf.select(config, "trainer.use_v1")  # a main of one's own need not set it
            used: Any = OmegaConf.merge(config, {"trainer": {"use_v1": False}}) if set_v1 else config
            self.oar, OarRayTrainer.running = resolve(used, here=True), True
            OarRayTrainer.unused -= OmegaConf.select(config, "trainer.critic_warmup") or 0

    def _balance_batch(
        self, batch: DataProto, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> None:
        """Lets verl balance the batch. If only some rows are to be scored, distributes the rows again."""
        if self.oar is None or self._warms_up() or keep_minibatch or getattr(self, "use_prefix_grouper", False):
            return super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)  # type: ignore[misc]
        self._start(self.oar)
        batch.batch[SAMPLED_AT] = torch.arange(len(batch))
        super()._balance_batch(batch, metrics, logging_prefix)  # type: ignore[misc]
        sampled_at = batch.batch.pop(SAMPLED_AT).tolist()
        lengths, needed = batch.batch["attention_mask"].sum(-1).tolist(), self._marked(batch).tolist()
        if (order := self._even_order(sampled_at, lengths, needed, metrics, logging_prefix)) is not None:
            batch.reorder(torch.tensor(order))

    def _needs_credit(self, batch: DataProto) -> Tensor:
        """Whether a row needs credit, bool `[B]`, by the base estimator's advantage from rewards alone. It is not known yet
        with KL in the reward, or before a reward model's scores: then every row counts.
        """
        if self.config.algorithm.use_kl_in_reward or "rm_scores" not in batch.batch:
            return torch.ones(len(batch), dtype=torch.bool)
        advantage_BL, reward_BL = self._advantage_of_scores(batch), batch.batch["rm_scores"]
        return needs_credit(self.oar, advantage_BL, reward_BL, batch.non_tensor_batch["uid"])

    def _marked(self, batch: DataProto, needed_B: Tensor | None = None) -> Tensor:
        """The field `NEEDED`, int64 `[B]`. `needed_B`: `_needs_credit`, if it is known."""
        token_BT, mask_BT = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
        offsets = pad(mask_BT.sum(-1).cumsum(0), (1, 0))
        packed = Packed(token_BT[mask_BT], torch.zeros_like(token_BT[mask_BT]), offsets)
        needed_B = self._needs_credit(batch) if needed_B is None else needed_B
        return self._needed_or_chosen(needed_B, packed, batch.batch["response_mask"].sum(-1))

    def _advantage_of_scores(self, batch: DataProto) -> Tensor:
        given = {"token_level_rewards": batch.batch["rm_scores"], "response_mask": batch.batch["response_mask"]}
        return base_advantage(**given, index=batch.non_tensor_batch["uid"], config=self.config.algorithm)[0]

    def _start(self, oar: OarConfig) -> None:
        """Checks the nodes before the first log-prob pass: some of verl's trainers have no hook between workers and steps."""
        if not hasattr(self, "_credit"):
            self._check_nodes(oar)
            self._make_credit(oar)

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        if self.oar is not None:
            self._start(self.oar)
        if self.oar is None or self._warms_up():
            return super()._compute_old_log_prob(batch)  # type: ignore[misc]
        for name in OURS:  # of an earlier pass over this batch: verl unites only equal fields
            batch.batch.pop(name, None)
        with self._asking(self._marked(batch)) as answer:
            result, *others = super()._compute_old_log_prob(batch)  # type: ignore[misc]
        result.batch.update(answer | {ENTROPY: result.batch["entropys"]})
        return result, *others

    def _asking(self, marked_B: Tensor, importance_only: bool = False) -> AbstractContextManager[dict[str, Tensor]]:
        assert self.oar is not None
        self._start(self.oar)
        kept = FIELDS if self._credit.dumps.folder is not None else (*USED, SEGMENTS)
        return asking(self.actor_rollout_wg, marked_B, self._request(importance_only), self.global_steps, kept)

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self.oar is None or batch.meta_info.get(RESHAPED):  # a trainer of one's own may update twice with a batch
            return super()._update_actor(batch)  # type: ignore[misc]
        started, metrics = time.perf_counter(), dict[str, float]()
        if alone := WEIGHTS not in batch.batch:  # bypass mode: no pass has computed log-probs, so this needs its own
            given, uids = (batch.batch["advantages"], batch.batch["token_level_rewards"]), batch.non_tensor_batch["uid"]
            # A trainer of one's own may split a group. Rewards of a part do not show whether all are equal.
            number, size = Counter(uids), self.config.actor_rollout_ref.rollout.n
            groups = [uid if number[uid] >= size else row for row, uid in enumerate(uids)]
            marked_B = self._marked(batch, needs_credit(self.oar, *given, groups))
            with self._asking(marked_B, importance_only=True) as answer:
                data = left_right_2_no_padding(batch.to_tensordict())
                temperature = self.config.actor_rollout_ref.rollout.temperature
                tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=temperature)
                self.actor_rollout_wg.compute_log_prob(data)
            batch.batch.update(answer)
        fields = {name: batch.batch.pop(name) for name in OURS if name in batch.batch}
        entropy_BL, advantage_BL = fields.pop(ENTROPY, None), batch.batch["advantages"]
        late_B1, size_BL = fields[STATUS] == Status.NOT_NEEDED, advantage_BL.abs().nan_to_num(0.0, 0.0, 0.0)
        # A trainer of one's own may change rewards after the rows were chosen.
        if not alone and late_B1.any() and "rm_scores" in batch.batch:
            grown_BL = size_BL - self._advantage_of_scores(batch).abs()
            late_B1 &= grown_BL.amax(-1, keepdim=True) > LATE * size_BL.max()
            fields[STATUS] = fields[STATUS].masked_fill(late_B1, Status.NOT_SCORED)
        fields[STATUS] = rewarded(fields[STATUS], advantage_BL[:, None])
        fields[WEIGHTS] = fields[WEIGHTS].masked_fill(fields[STATUS] == Status.BAD_REWARD, 1.0)
        status_B = fields[STATUS][:, 0]
        self._count(metrics, fields[MEASURES], status_B, batch.batch["token_level_scores"])
        self._learned(metrics, fields[NEEDED][:, 0] == CHOSEN, status_B, batch.batch["response_mask"].sum(-1))
        OarRayTrainer.unused = 0
        weighted_BL = weighted(advantage_BL, fields[WEIGHTS])
        metrics["timing_s/oar"] = time.perf_counter() - started
        if not alone:  # the pass ran before this clock
            metrics["timing_s/oar"] += fields[SECONDS].sum().item() / self._ranks()
        shown = {name: fields[name] for name in (*SHOWN, WEIGHTS, MEASURES) if name in fields}
        shown |= {} if entropy_BL is None else {"entropy": entropy_BL}
        held = padded_batch(self.global_steps, batch, status_B, shown)
        metrics.update(answer_mismatch(self._credit, held) | show(self._credit, held, {}))
        batch.batch["advantages"] = weighted_BL
        result = super()._update_actor(batch)  # type: ignore[misc]
        batch.meta_info = {**batch.meta_info, RESHAPED: True}  # a new one: the parts of a split batch share theirs
        result.meta_info["metrics"].update({name: [value] for name, value in metrics.items()})
        return result


@contextmanager
def asking(
    workers: Any, marked_B: Tensor, request: dict[str, Any], step: int, kept: Sequence[str]
) -> Iterator[dict[str, Tensor]]:
    """Lets the next log-prob pass of the workers also score rows (`NEEDED`). The dict gets `kept` fields, padded."""
    needed_B1, compute = marked_B.long()[:, None], workers.compute_log_prob
    answer = {NEEDED: needed_B1}

    def ask(data: TensorDict) -> TensorDict:
        asked, size = data.clone(recurse=False), (len(data), data["responses"].shape[1])
        asked[NEEDED] = needed_B1
        tu.assign_non_tensor(asked, **{REQUEST: request})
        output: TensorDict = compute(asked)
        if WEIGHTS not in output:
            raise RuntimeError(no_importance(step))
        given = {name: output.pop(name) for name in FIELDS}
        for name in kept:
            per_token, fill = name in (*SHOWN, WEIGHTS), int(name == WEIGHTS)
            rows = given[name].to_padded_tensor(fill, size) if per_token else given[name].values().view(size[0], -1)
            answer[name] = rows
        return output

    workers.compute_log_prob = ask
    try:
        yield answer
    finally:
        workers.compute_log_prob = compute


def advantage_to_weight(**given: Any) -> Any:
    """`base_advantage` for verl's trainer, which weights it before the update. RuntimeError: it never does."""
    OarRayTrainer.unused += 1
    if OarRayTrainer.unused > UNUSED:
        what = f"{UNUSED} advantages were computed with algorithm.adv_estimator=oar, and none was weighted"
        fault = "this trainer does not update the actor through `RayPPOTrainer._update_actor`, where OAR weights them"
        raise RuntimeError(f"{what}: {fault}")
    return base_advantage(**given)


def base_advantage(**given: Any) -> Any:
    """Returns the base estimator's advantages and returns `[B, L]`, from the arguments of verl's estimators."""
    estimator = core_algos.get_adv_estimator_fn(parsed(given["config"]).base_estimator)
    given["norm_adv_by_std_in_grpo"] = given["config"].get("norm_adv_by_std_in_grpo", True)
    return estimator(**capabilities.accepted(estimator, **given))


def register() -> None:
    """Puts a subclass in the place of verl's trainer. Ray sends classes by name, so the subclass has the name of the place."""
    host = ray_trainer.RayPPOTrainer
    if not issubclass(host, OarRayTrainer):
        name = {"__module__": host.__module__, "__qualname__": host.__qualname__}
        ray_trainer.RayPPOTrainer = type(host.__name__, (OarRayTrainer, host), name)


register()  # at import, by `plugin`'s hook
