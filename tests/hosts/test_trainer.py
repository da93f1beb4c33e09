"""What the trainer does to a batch, with verl's own advantage functions and an in-memory stand-in for TransferQueue."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

pytest.importorskip("verl")

import verl  # noqa: F401
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import step_seed
from oar_plugin.hosts.verl import offload
from oar_plugin.hosts.verl import trainer as ours
from oar_plugin.hosts.verl.offload_record import ENGINE_FIELDS, OFFLOAD, OffloadRecord
from oar_plugin.passes.request import FIELDS, IMPORTANCE, NEEDED, REPORT, REQUEST, SEGMENTS
from tests.hosts.engine.world import nested

LENGTHS = [5, 7, 4, 6, 5, 5]
UIDS = ["a", "a", "a", "b", "b", "b"]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]  # group b has nothing to learn


class Queue:
    """`kv_batch_get` and `kv_batch_put` on a dictionary."""

    def __init__(self, fields):
        self.fields = fields

    def kv_batch_get(self, keys, partition_id, select_fields):
        names = [name for name in select_fields if name in self.fields]
        return TensorDict({name: self.fields[name] for name in names}, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields):
        self.fields.update({name: fields[name] for name in fields.keys()})  # noqa: SIM118 - a TensorDict
        return batch_of(keys)


class Batch(SimpleNamespace):
    def __len__(self):
        return len(self.keys)


def batch_of(keys):
    return Batch(keys=keys, partition_id="train", extra_info={}, tags=[{} for _ in keys])


def rm_scores(rewards, lengths):
    rows = [torch.zeros(length) for length in lengths]
    for row, reward in zip(rows, rewards, strict=True):
        row[-1] = reward
    return nested(rows)


BASE = importlib.import_module("verl.trainer.ppo.v1.trainer_base")


@pytest.fixture
def world(monkeypatch):
    """A trainer, its queue, and a batch."""

    def build(keys=None, rewards=REWARDS, lengths=LENGTHS, uids=UIDS, **oar):
        queue = Queue(
            {
                "uid": NonTensorStack(*uids),
                "response_mask": nested([torch.ones(length, dtype=torch.long) for length in lengths]),
                "rm_scores": rm_scores(rewards, lengths),
            }
        )
        monkeypatch.setattr(ours, "tq", queue)
        monkeypatch.setattr(BASE, "tq", queue)
        algorithm = {"adv_estimator": "oar", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
        trainer = object.__new__(ours.OarTrainerSync)
        trainer.config = OmegaConf.create(
            {
                "algorithm": algorithm | {"norm_adv_by_std_in_grpo": True},
                "actor_rollout_ref": {"rollout": {"n": 3, "temperature": 1.0}},
                "data": {"max_response_length": 16},
            }
        )
        trainer.oar = OarConfig.parse(oar)
        trainer.timing_raw = {}
        trainer.global_steps = 1
        trainer._dump = None
        trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
        return trainer, queue, batch_of(keys or [f"{uid}_{i}_0" for i, uid in enumerate(uids)])

    return build


def credited(trainer, queue, batch):
    """Advantages and metrics."""
    metrics = {}
    trainer._compute_advantage(batch, metrics)
    return advantages(queue), metrics


def advantages(queue):
    return queue.fields["advantages"].to_padded_tensor(0.0)


def needed(queue):
    return [int(row) for row in queue.fields[NEEDED].unbind()]


def report_from_actor(queue, lengths=LENGTHS, status=Status.SCORED):
    """Importance as an actor would send it: random on the first tokens, the last one is the answer."""
    generator = torch.Generator().manual_seed(0)
    segments = [torch.full((length,), int(Segment.REASONING), dtype=torch.int8) for length in lengths]
    for row in segments:
        row[-1] = Segment.ANSWER
    queue.fields[SEGMENTS] = nested(segments)
    queue.fields[IMPORTANCE] = nested([torch.rand(length, generator=generator) for length in lengths])
    queue.fields[REPORT] = nested([torch.tensor([float(status), 0.5]) for _ in lengths])


def host_advantage(estimator, rewards=REWARDS, lengths=LENGTHS, uids=UIDS):
    scores = rm_scores(rewards, lengths).to_padded_tensor(0.0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return get_adv_estimator_fn(estimator)(
        token_level_rewards=scores, response_mask=mask.long(), index=np.array(uids, dtype=object)
    )[0]


@pytest.mark.parametrize(("kl_in_reward", "marked"), [(False, [1, 1, 1, 0, 0, 0]), (True, [1] * 6)])
def test_rows_of_groups_without_a_signal_are_not_needed_unless_kl_is_in_the_reward(world, kl_in_reward, marked):
    trainer, queue, batch = world()
    trainer.config.algorithm.use_kl_in_reward = kl_in_reward
    trainer._mark_needed_rows(batch, {})
    assert needed(queue) == marked


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"])
def test_the_base_advantage_is_the_hosts_own_and_its_total_is_kept(world, estimator):
    trainer, queue, batch = world(base_estimator=estimator)
    report_from_actor(queue)
    got, metrics = credited(trainer, queue, batch)
    assert trainer.timing_raw["oar"] >= 6 * 0.5, "seconds of the actor"
    want = host_advantage(estimator)
    torch.testing.assert_close(got.sum(-1), want.sum(-1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got[0], want[0])
    assert trainer.config.algorithm.adv_estimator == "oar"
    assert metrics["oar/scored"] == 1.0


def test_without_std_normalisation(world):
    trainer, queue, batch = world()
    trainer.config.algorithm.norm_adv_by_std_in_grpo = False
    report_from_actor(queue, status=Status.NO_ANSWER)
    got, _ = credited(trainer, queue, batch)
    torch.testing.assert_close(got[:, 0], torch.tensor([2 / 3, -1 / 3, -1 / 3, 0, 0, 0]))


@pytest.mark.parametrize("reason", ["no_answer", "not_scored"])
def test_a_batch_that_fell_back_or_was_never_scored_is_exactly_the_hosts(world, reason):
    trainer, queue, batch = world()
    if reason == "no_answer":
        report_from_actor(queue, status=Status.NO_ANSWER)
    got, metrics = credited(trainer, queue, batch)
    assert torch.equal(got, host_advantage("grpo"))
    assert metrics[f"oar/fallback/{reason}"] == 1.0


def test_every_trajectory_of_a_session_gets_the_sessions_advantage(world):
    """verl does this for the estimator *named* grpo only; a name of our own must not lose it."""
    keys = ["a_0_0", "a_0_1", "a_1_0", "a_2_0"]
    rewards, lengths, uids = [1.0, 1.0, 0.0, 0.0], [5, 6, 4, 5], ["a"] * 4
    trainer, queue, batch = world(keys=keys, rewards=rewards, lengths=lengths, uids=uids)
    report_from_actor(queue, lengths, status=Status.NO_ANSWER)
    got, _ = credited(trainer, queue, batch)
    want = host_advantage("grpo", [1.0, 0.0, 0.0], [6, 4, 5], ["a"] * 3)[:, 0]
    torch.testing.assert_close(got[:, 0], want[[0, 0, 1, 2]])


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("bypass", [False, True])
def test_the_request_rides_on_the_log_prob_pass_and_is_taken_off_again(world, monkeypatch, mode, bypass):
    trainer, _, batch = world()
    seen = []
    trainer.__class__ = ours.TRAINERS[mode]
    trainer.config.algorithm.rollout_correction = {"bypass_mode": bypass}

    def compute(self, batch, metrics):
        seen.append(dict(batch.extra_info))
        return batch

    monkeypatch.setattr(BASE.PPOTrainer, "_compute_old_log_prob", compute)
    if mode == "separate_async":
        trainer.local_trigger_step = 0
        trainer.actor_rollout_wg.save_model_to_cpu = lambda step: None
    trainer.actor_rollout_wg.compute_log_prob = lambda batch: seen.append(dict(batch.extra_info))
    trainer._compute_old_log_prob(batch, {})
    assert REQUEST not in batch.extra_info
    requests = [info[REQUEST] for info in seen if REQUEST in info]
    assert len(requests) == 1
    assert requests[0]["importance_only"] is bypass
    assert len(seen) == (2 if bypass else 1)


# ---- importance from the rollout engines


def report_from_engines(queue, statuses, lengths=LENGTHS):
    """As the agent loop puts it into the queue with each response."""
    report_from_actor(queue, lengths)
    queue.fields |= {ENGINE_FIELDS[name]: queue.fields.pop(name) for name in FIELDS}
    queue.fields[ENGINE_FIELDS[REPORT]] = nested([torch.tensor([float(status), 0.0]) for status in statuses])
    records = [OffloadRecord(int(s), 1, copies=4, tokens=40, generated_at=1e9, done_at=(1e9,) * 11) for s in statuses]
    queue.fields[OFFLOAD] = torch.stack([record.to_row() for record in records])


@pytest.fixture
def offloading(world, host_pass):
    """The same after the log-prob pass, with these statuses from the engines; the second group has no signal."""

    def build(*statuses, **perturbation):
        # A gate whose weights keep the order of the scores.
        perturbation["backend"] = "rollout"
        trainer, queue, batch = world(importance="oar_p", gate="bi_level", perturbation=perturbation)
        report_from_engines(queue, [*statuses] + [Status.NOT_NEEDED] * 3)
        metrics = {}
        trainer._compute_old_log_prob(batch, metrics)
        return trainer, queue, batch, metrics

    return build


@pytest.fixture
def host_pass(monkeypatch):
    """verl's log-prob pass; the actor answers 7 everywhere when it is asked."""
    requests = []

    def compute(self, batch, metrics):
        if REQUEST in batch.extra_info:
            requests.append(dict(batch.extra_info[REQUEST]))
            report_from_actor(ours.tq)
            ours.tq.fields[IMPORTANCE] = nested([torch.full((n,), 7.0) for n in LENGTHS])
        return batch

    monkeypatch.setattr(BASE.PPOTrainer, "_compute_old_log_prob", compute)
    return requests


def test_scores_of_the_engines_need_nothing_of_the_actor(offloading, host_pass):
    trainer, queue, batch, metrics = offloading(*[Status.SCORED] * 3)
    assert host_pass == []
    first = queue.fields[ENGINE_FIELDS[IMPORTANCE]].unbind()[0].clone()
    trainer._compute_advantage(batch, metrics)
    got, want = advantages(queue), host_advantage("grpo")
    torch.testing.assert_close(got.sum(-1), want.sum(-1), rtol=1e-4, atol=1e-5)
    assert (got[0, :4].argsort() == first[:4].argsort()).all()
    assert metrics["oar/scored"] == 0.5
    assert metrics["oar/offload/left_for_actor"] == 0
    assert metrics["oar/offload/hidden_share"] == 1


def test_what_an_engine_could_not_score_the_actor_does(offloading, host_pass):
    trainer, queue, batch, metrics = offloading(Status.SCORED, Status.TIMED_OUT, Status.NO_ANSWER)
    first = queue.fields[ENGINE_FIELDS[IMPORTANCE]].unbind()[0].clone()
    (request,) = host_pass
    assert (request["importance"], request["perturbation"]) == ("fisher", None)
    assert needed(queue) == [0, 1, 0, 0, 0, 0]
    trainer._compute_advantage(batch, metrics)
    got = advantages(queue)
    assert (got[0, :4].argsort() == first[:4].argsort()).all()
    assert torch.equal(got[2], host_advantage("grpo")[2])  # no answer: plain
    assert metrics["oar/fallback/no_answer"] == pytest.approx(1 / 3)
    assert metrics["oar/fallback/constant"] == pytest.approx(1 / 3)  # the made-up actor says 7 everywhere
    assert metrics["oar/offload/fault/timed_out"] == 1


def test_the_fallback_is_any_importance_without_copies(offloading, host_pass):
    offloading(*[Status.TIMED_OUT] * 3, fallback="entropy")
    assert host_pass[0]["importance"] == "entropy"


def test_without_a_fallback_the_response_keeps_its_plain_advantage(offloading, host_pass):
    trainer, queue, batch, metrics = offloading(Status.SCORED, Status.ENGINE_FAILED, Status.SCORED, fallback="none")
    assert host_pass == []
    trainer._compute_advantage(batch, metrics)
    assert torch.equal(advantages(queue)[1], host_advantage("grpo")[1])
    assert metrics["oar/fallback/engine_failed"] == pytest.approx(1 / 3)


def test_the_request_knows_the_sampling_temperature_and_the_step(world, host_pass):
    trainer, _, batch = world(seed=3)
    trainer.config.actor_rollout_ref.rollout.temperature = 0.6
    trainer.config.algorithm.rollout_correction = None
    for step in (1, 2):
        trainer.global_steps = step
        trainer._compute_old_log_prob(batch, {})
    assert [request["temperature"] for request in host_pass] == [0.6, 0.6]
    assert [request["seed"] for request in host_pass] == [step_seed(3, 1), step_seed(3, 2)]


def test_the_offload_sets_what_it_needs_in_verls_configuration(monkeypatch):
    registered = []
    server = importlib.import_module("oar_plugin.hosts.verl.rollout_server")
    monkeypatch.setattr(server, "register", lambda *settings: registered.append(settings))
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"agent": {"agent_loop_manager_class": None}, "scheduling_policy": "fcfs"}}}
    )
    OmegaConf.set_struct(config, True)
    offload.switch_on(config, OarConfig.parse({"perturbation": {"max_in_flight": 5}}))
    assert registered == [(5, 0.15)]
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == offload.MANAGER
    assert config.actor_rollout_ref.rollout.scheduling_policy == "priority"
