"""What `RayPPOTrainer` with OAR does to a batch. verl's own methods run; only its workers are a stand-in."""

from functools import cache
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

pytest.importorskip("verl")

import verl  # noqa: F401
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer as host
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu

from benchmarks.tiny.words import make_tokenizer
from oar_plugin.config import OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import step_seed
from oar_plugin.hosts.verl import ray_trainer as ours
from oar_plugin.hosts.verl import trainer_credit
from oar_plugin.hosts.verl.importance_pass import response_rows
from oar_plugin.hosts.verl.settings import resolve
from oar_plugin.passes.request import NEEDED, REQUEST, WEIGHTS, Request
from oar_plugin.runs.recipe import compose_recipe
from oar_plugin.token_credit import TokenCredit
from tests.asked import GIVEN
from tests.hosts.answer import answer_of
from tests.hosts.engine.world import nested
from tests.hosts.test_settings import config as plain
from tests.hosts.whole_run import RECIPES

LENGTHS, UIDS, REWARDS = (5, 7, 4, 6, 5, 5), (*"aaabbb",), (1.0, 0.0, 0.0, 1.0, 1.0, 1.0)
"""The second group has nothing to learn."""


class Workers:
    """Answers as the actor's engines do, and keeps what it was asked."""

    workers = ("w0",)

    def __init__(self, ranks=1, status=Status.SCORED):
        self._dispatch_info, self.status, self.asked, self.updated = {"actor": [*range(ranks)]}, status, [], []

    def compute_log_prob(self, data):
        self.asked.append(data)
        rows = [torch.rand(len(row)) for row in data["input_ids"].unbind()]
        output = {"log_probs": nested(-row for row in rows), "entropy": nested(rows)}
        if REQUEST in data and self.status is not None:
            parts = [torch.full((len(row),), int(Segment.REASONING)) for row in response_rows(data, "responses")]
            status = [self.status if needed else Status.NOT_NEEDED for needed in data[NEEDED]]
            scores = [torch.linspace(0, 1, len(part)) for part in parts]
            output |= answer_of(scores, parts, status, Request.from_dict(tu.get(data, REQUEST)).config)
        return tu.get_tensordict(output, {"metrics": {"mfu": 0.1}})

    def update_actor(self, data):
        self.updated.append(data)
        return tu.get_tensordict({}, {"metrics": {"mfu": 0.1}})


@cache
def recipe():
    more = ["actor_rollout_ref.rollout.temperature=0.6", "trainer.default_local_dir=nowhere", "data.seed=3"]
    return compose_recipe(RECIPES / "qwen2_5_7b_math", "oar", more)


def trainer_of(estimator="oar", workers=None, cls=None, **oar):
    config = OmegaConf.merge(recipe(), {"algorithm": {"adv_estimator": estimator, "oar": oar}})
    one = (cls or host.RayPPOTrainer)(config, make_tokenizer(384), {Role.ActorRollout: None}, None)
    one.global_steps, one.actor_rollout_wg = 1, workers or Workers()
    return one


def batch_of(lengths=LENGTHS, uids=UIDS, rewards=REWARDS):
    """As verl has it after generation: prompts padded on the left, responses on the right."""
    rows = torch.arange(len(lengths))
    real_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = torch.cat([torch.ones(len(rows), 4, dtype=torch.long), real_BL.long()], 1)
    mask[0, 0] = 0
    scores = torch.zeros(real_BL.shape)
    scores[rows, torch.tensor(lengths) - 1] = torch.tensor(rewards)
    prompts, responses = 7 * mask[:, :4], mask[:, 4:]
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": mask}
    tensors |= {"input_ids": torch.cat([prompts, responses], 1)}
    tensors |= {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0), "response_mask": real_BL.long()}
    return DataProto.from_dict(tensors | {"rm_scores": scores, "row": rows}, {"uid": np.array(uids, dtype=object)})


def before_update(one, batch, bypass=False):
    """What `fit` does to a batch between the rewards and the update."""
    one._balance_batch(batch, {})
    if not bypass:
        old, _ = one._compute_old_log_prob(batch)
        batch = batch.union(old)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] = batch.batch["rm_scores"]
    algorithm = one.config.algorithm
    return host.compute_advantage(batch, algorithm.adv_estimator, config=algorithm, num_repeat=3)


def step(one, batch, bypass=False):
    """`before_update`, and the update; returns the batch, verl's advantage, and the metrics of the update."""
    batch = before_update(one, batch, bypass)
    host_BL = batch.batch["advantages"].clone()
    return batch, host_BL, one._update_actor(batch).meta_info["metrics"]


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    monkeypatch.setattr(host.RayPPOTrainer.__mro__[-2], "_create_dataloader", Mock())
    monkeypatch.setattr(ours.OarRayTrainer, "running", False)
    monkeypatch.setattr(ours.OarRayTrainer, "unused", 0)
    monkeypatch.setattr(trainer_credit, "check_nodes", asked := Mock())
    return asked


@pytest.mark.parametrize("bypass", [False, True])
def test_the_update_gets_the_hosts_advantage_times_the_weights(bypass, nodes):
    one, batch = trainer_of(), batch_of()
    batch, host_BL, metrics = step(one, batch, bypass)
    (asked,), (updated,) = one.actor_rollout_wg.asked, one.actor_rollout_wg.updated
    request = tu.get(asked, REQUEST)
    assert (request["importance_only"], request["temperature"], request["seed"]) == (bypass, 0.6, step_seed(3, 1))
    order = batch.batch["row"].tolist()
    for name in ("responses", "response_mask"):
        assert not asked[name].is_nested, "the actors take the padding away, each from its rows"
        assert [row.tolist() for row in response_rows(asked, name)] == [[1] * LENGTHS[row] for row in order]
    assert asked[NEEDED][:, 0].tolist() == [(2, 2, 2, 0, 0, 0)[row] for row in order], "all teach at first"
    want = TokenCredit(one.oar, one.tokenizer).reshape(
        1,
        host_BL,
        nested(torch.linspace(0, 1, LENGTHS[row]) for row in order).to_padded_tensor(0.0),
        torch.where(batch.batch["response_mask"].bool(), int(Segment.REASONING), int(Segment.OUTSIDE)),
        torch.tensor([int(Status.SCORED if row < 3 else Status.NOT_NEEDED) for row in order]),
    )
    torch.testing.assert_close(updated["advantages"], want.advantage_BL)
    assert not torch.allclose(want.advantage_BL, host_BL)
    assert metrics["oar/scored"] == [0.5]
    assert metrics["timing_s/oar"][0] > (0 if bypass else 6 * 0.5)
    assert not [name for name in list(updated.keys()) if name.startswith("oar_")], (
        "nothing of ours travels to the update"
    )
    assert nodes.mock_calls == [call(("w0",), (), "fsdp", one.oar)], "asked once, before the first pass"
    one._update_actor(batch)
    assert len(one.actor_rollout_wg.asked) == 1, "a second update with the same batch"
    assert one.actor_rollout_wg.updated[1]["advantages"].equal(updated["advantages"])


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"])
def test_a_batch_that_fell_back_has_exactly_the_hosts_advantage(estimator):
    """Also of a base estimator that verl calls by name, beside a trainer with another; rows are in the order of sampling."""
    fell_back = trainer_of(base_estimator=estimator, workers=Workers(status=Status.NOT_SCORED))
    trainer_of()
    got, want = (step(one, batch_of())[0].batch for one in (fell_back, trainer_of(estimator)))
    assert got["advantages"][got["row"].argsort()].equal(want["advantages"][want["row"].argsort()])
    assert fell_back.config.algorithm.adv_estimator == "oar"


def test_another_estimator_runs_only_verls_methods(monkeypatch):
    one, verls, batch = trainer_of("grpo"), host.RayPPOTrainer.__mro__[-2], object()
    methods = {name: Mock() for name in ("_balance_batch", "_compute_old_log_prob", "_update_actor")}
    for name, method in methods.items():
        monkeypatch.setattr(verls, name, method)
    one._balance_batch(batch, {}, "prefix", keep_minibatch=True)
    one._compute_old_log_prob(batch)
    one._update_actor(batch)
    calls = [method.mock_calls for method in methods.values()]
    assert calls == [[call(batch, {}, "prefix", True)], [call(batch)], [call(batch)]]


def test_every_row_is_scored_with_kl_in_the_reward_or_before_a_reward_models_scores():
    one, batch = trainer_of(), batch_of()
    one.config.algorithm.use_kl_in_reward = True
    assert one._needs_credit(batch).all()
    one.config.algorithm.use_kl_in_reward = False
    assert one._needs_credit(batch).tolist() == [row < 3 for row in range(6)]
    del batch.batch["rm_scores"]
    assert one._needs_credit(batch).all()


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("others", [(), (1.0, 0.0)])
@pytest.mark.parametrize(("reward", "number"), GIVEN["equal"])
def test_equal_rewards_need_no_credit_though_rounding_gives_them_an_advantage(reward, number, others, bypass):
    uids = (*"a" * number, *"b" * len(others))
    batch, host_BL, metrics = step(trainer_of(), batch_of((5,) * len(uids), uids, (reward,) * number + others), bypass)
    kept = batch.non_tensor_batch["uid"] == "a"
    assert batch.batch["advantages"][kept].equal(host_BL[kept])
    assert metrics["oar/scored"] == [pytest.approx(len(others) / len(uids))]
    assert metrics["oar/fallback/any"] == [0]


def test_a_seed_that_is_null_is_drawn_once_in_a_runs_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, again = (trainer_of(seed=None) for _ in range(2))
    assert first.oar.seed == again.oar.seed == first.config.algorithm.oar.seed
    assert capsys.readouterr().err.count(f"algorithm.oar.seed: {first.oar.seed}, drawn for this run") == 2


def test_ranks_get_equal_numbers_of_rows_to_score():
    """verl's own dealing, by tokens, gives one of the two ranks all four of them."""
    one, metrics = trainer_of(workers=Workers(ranks=2)), {}
    lengths, rewards = (40, 37, 30, 31, 20, 21, 10, 11), (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    batch = batch_of(lengths, (*"abacdbdc",), rewards)
    one._balance_batch(batch, metrics)
    assert one._needs_credit(batch).view(2, 4).sum(-1).tolist() == [2, 2]
    assert (batch.batch["row"].view(2, 4).diff() > 0).all(), "in the order of sampling"
    assert metrics["global_seqlen/balanced_max"] == batch.batch["attention_mask"].view(2, -1).sum(-1).max()
    assert ours.SAMPLED_AT not in batch.batch


def test_workers_without_the_plugin_stop_the_run():
    one = trainer_of(workers=Workers(status=None))
    with pytest.raises(RuntimeError, match=r"step 1: .* returned none"):
        step(one, batch_of())
    assert one.actor_rollout_wg.compute_log_prob.__func__ is Workers.compute_log_prob, "verl's own is back"


def test_a_step_without_an_update_scores_nothing():
    one = trainer_of()
    one.config.trainer.critic_warmup = 2
    assert not [name for name in before_update(one, batch_of()).batch.keys() if name.startswith("oar_")]  # noqa: SIM118
    assert REQUEST not in one.actor_rollout_wg.asked[0]


@pytest.mark.parametrize("trainer", [{"trainer__use_v1": None}, {"trainer__use_v1": False}, {"rollout": {"nnodes": 1}}])
def test_copies_are_for_the_actor_also_in_trainers_of_verl_experimental(trainer):
    copies = {"importance": "oar_p", "perturbation": {"backend": "rollout"}}
    with pytest.raises(OarConfigError, match=r"backend=rollout with RayPPOTrainer") as raised:
        resolve(plain(**trainer, algorithm__oar=copies))
    assert ("use_v1" in str(raised.value)) == (trainer != {"trainer__use_v1": None}), "verl 0.8 has no such key"
    assert resolve(plain(**trainer, algorithm__oar={"importance": "oar_p"})).importance_object.copies


def test_a_subclass_may_drop_rows_after_the_log_probs():
    class_of_its_own = type("Own", (host.RayPPOTrainer,), {})
    one, batch = trainer_of(cls=class_of_its_own), batch_of(rewards=(1.0, 0.0, 0.0, 1.0, 0.0, 1.0))
    batch = batch.union(one._compute_old_log_prob(batch)[0])[3:]
    batch.batch["advantages"] = batch.batch["token_level_scores"] = torch.ones(3, 7)
    assert one._update_actor(batch).meta_info["metrics"]["oar/scored"] == [1.0]
    kept_BL, mask_BL = batch.batch["advantages"] * batch.batch["response_mask"], batch.batch["response_mask"]
    torch.testing.assert_close(kept_BL.sum(-1), mask_BL.sum(-1).float(), rtol=1e-4, atol=1e-5)
    assert (kept_BL.amax(-1) > 1).all()


def test_the_parts_of_a_batch_that_is_split_before_the_update_are_weighted_each_once():
    one, other = trainer_of(), trainer_of()
    step(other, batch_of())
    (whole,) = other.actor_rollout_wg.updated
    for part in before_update(one, batch_of()).chunk(2):
        one._update_actor(part)
    parts = [part["advantages"] for part in one.actor_rollout_wg.updated]
    assert len(parts) == 2
    torch.testing.assert_close(torch.cat(parts), whole["advantages"])


def test_a_reward_that_changes_after_the_rows_were_chosen_is_counted():
    one = trainer_of()
    batch = before_update(one, batch_of())
    batch.batch["advantages"] = batch.batch["response_mask"].float()
    metrics = one._update_actor(batch).meta_info["metrics"]
    assert metrics["oar/fallback/not_scored"] == [0.5], "three of six responses"


def test_a_trainer_that_updates_in_its_own_way_is_stopped():
    one, batch = trainer_of(), batch_of()
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    for _ in range(ours.UNUSED):
        host.compute_advantage(batch, "oar", config=one.config.algorithm)
    with pytest.raises(RuntimeError, match="none was weighted"):
        host.compute_advantage(batch, "oar", config=one.config.algorithm)


def test_log_probs_may_be_computed_again_before_the_update():
    one, batch = trainer_of(), batch_of()
    for _ in range(2):
        torch.manual_seed(0)  # verl unites only equal log-probs
        old, _ = one._compute_old_log_prob(batch)
        batch = batch.union(old)
    assert {WEIGHTS, ours.ENTROPY} < {*batch.batch.keys()}


@pytest.mark.parametrize("case", GIVEN["rewards"])
def test_a_bad_reward_trains_as_in_the_host_and_is_told(case, caplog):
    one = trainer_of()
    batch, host_BL, metrics = step(one, batch_of(rewards=case["rewards"]))
    (asked,), (updated,) = one.actor_rollout_wg.asked, one.actor_rollout_wg.updated
    bad = [place for place, row in enumerate(batch.batch["row"].tolist()) if row in case["bad"]]
    assert not asked[NEEDED][bad].any()
    torch.testing.assert_close(updated["advantages"][bad], host_BL[bad], equal_nan=True)
    assert updated["advantages"].isfinite().all(-1).sum() == 6 - len(bad)
    assert metrics["oar/fallback/bad_reward"] == metrics["oar/fallback/any"]
    assert [m for m in caplog.messages if "what does the reward function return?" in m]
