"""What `RayPPOTrainer` with OAR does to a batch. verl's own methods run; only its workers are a stand-in."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

pytest.importorskip("verl")

import verl  # noqa: F401
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer as host
from verl.utils import tensordict_utils as tu

from benchmarks.tiny.words import make_tokenizer
from oar_plugin.config import OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import step_seed
from oar_plugin.hosts.verl import ray_trainer as ours
from oar_plugin.hosts.verl import trainer_credit
from oar_plugin.hosts.verl.settings import RAY_TRAINER, resolve
from oar_plugin.page.record import parse_response
from oar_plugin.passes.request import IMPORTANCE, NEEDED, REQUEST, SECONDS, SEGMENTS, STATUS
from oar_plugin.token_credit import TokenCredit
from tests.hosts.engine.world import nested
from tests.hosts.test_settings import config as plain

PROMPT = 4
LENGTHS, UIDS, REWARDS = (5, 7, 4, 6, 5, 5), (*"aaabbb",), (1.0, 0.0, 0.0, 1.0, 1.0, 1.0)


class Workers:
    """Answers as the actor's engines do, and keeps what it was asked."""

    workers = ("w0",)

    def __init__(self, ranks=1, knows_oar=True):
        self._dispatch_info, self.knows_oar, self.asked, self.updated = {"actor": [*range(ranks)]}, knows_oar, [], []

    def compute_log_prob(self, data):
        self.asked.append(data)
        lengths = data["input_ids"].offsets().diff().tolist()
        output = {
            "log_probs": nested(-torch.rand(n) for n in lengths),
            "entropy": nested(torch.rand(n) for n in lengths),
        }
        if REQUEST in data and self.knows_oar:
            parts = [
                torch.full((len(row),), int(Segment.REASONING), dtype=torch.int8) for row in data["responses"].unbind()
            ]
            output[IMPORTANCE] = nested(torch.linspace(0, 1, len(part)) for part in parts)
            output[SEGMENTS] = nested(parts)
            output[STATUS] = nested(torch.tensor([Status.SCORED if n else Status.NOT_NEEDED]) for n in data[NEEDED])
            output[SECONDS] = nested(torch.tensor([0.5]) for _ in parts)
        return tu.get_tensordict(output, {"metrics": {"mfu": 0.1}})

    def update_actor(self, data):
        self.updated.append(data)
        return tu.get_tensordict({}, {"metrics": {"mfu": 0.1, "pg_loss": [0.0]}})


def trainer_of(estimator="oar", workers=None, home=None, cls=None, **oar):
    one = object.__new__(cls or host.RayPPOTrainer)
    changes = {"algorithm__adv_estimator": estimator, "algorithm__oar": oar, "trainer__use_v1": False}
    settings = {
        "algorithm": {"gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False, "norm_adv_by_std_in_grpo": True},
        "actor_rollout_ref": {
            "rollout": {"n": 3, "temperature": 0.6, "multi_turn": {"enable": False}},
            "actor": {
                **{"ppo_mini_batch_size": 2, "ppo_epochs": 1, "data_loader_seed": 1, "shuffle": False},
                **{"calculate_entropy": False, "entropy_coeff": 0.0, "strategy": "fsdp2"},
            },
        },
        "data": {"max_response_length": 8},
        "trainer": {"default_local_dir": str(home)},
    }
    one.use_prefix_grouper = False
    one.config = OmegaConf.merge(plain(**changes), settings)
    one.tokenizer, one.global_steps = make_tokenizer(384), 1
    one.actor_rollout_wg = workers or Workers()
    return one


def batch_of(lengths=LENGTHS, uids=UIDS, rewards=REWARDS):
    """As verl has it after generation: prompts padded on the left, responses on the right."""
    rows, width = len(lengths), max(lengths)
    real_BL = torch.arange(width) < torch.tensor(lengths)[:, None]
    prompt_BP = torch.ones(rows, PROMPT, dtype=torch.long)
    prompt_BP[0, 0] = 0
    mask = torch.cat([prompt_BP, real_BL.long()], 1)
    responses = torch.arange(width).repeat(rows, 1) * real_BL
    scores = torch.zeros(rows, width)
    scores[torch.arange(rows), torch.tensor(lengths) - 1] = torch.tensor(rewards)
    tensors = {
        "prompts": prompt_BP * 7,
        "responses": responses,
        "input_ids": torch.cat([prompt_BP * 7, responses], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
        "response_mask": real_BL.long(),
        "rm_scores": scores,
        "row": torch.arange(rows),
    }
    batch = DataProto.from_dict(tensors, {"uid": np.array(uids, dtype=object)})
    batch.meta_info["temperature"] = 0.6
    return batch


def step(one, batch, bypass=False):
    """What `fit` does to a batch between the rewards and the update; returns the metrics of the update."""
    one._balance_batch(batch, metrics := {})
    if not bypass:
        old, _ = one._compute_old_log_prob(batch)
        old.batch.pop("entropys")
        batch = batch.union(old)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] = batch.batch["rm_scores"]
    algorithm = one.config.algorithm
    batch = host.compute_advantage(batch, algorithm.adv_estimator, config=algorithm, num_repeat=3)
    host_BL = batch.batch["advantages"].clone()
    return batch, host_BL, metrics | one._update_actor(batch).meta_info["metrics"]


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    asked = []
    monkeypatch.setattr(trainer_credit, "check_nodes", lambda *handles: asked.append(handles))
    monkeypatch.setattr(ours.OarRayTrainer, "running", None)
    return asked


@pytest.mark.parametrize("bypass", [False, True])
def test_the_update_gets_the_hosts_advantage_times_the_weights(bypass, nodes):
    one, batch = trainer_of(seed=3), batch_of()
    batch, host_BL, metrics = step(one, batch, bypass)
    (asked,), (updated,) = one.actor_rollout_wg.asked, one.actor_rollout_wg.updated
    request = tu.get(asked, REQUEST)
    assert (request["importance_only"], request["temperature"], request["seed"]) == (bypass, 0.6, step_seed(3, 1))
    assert [len(row) for row in asked["responses"].unbind()] == [LENGTHS[row] for row in batch.batch["row"]]
    needed = {int(row): int(n) for row, n in zip(batch.batch["row"], asked[NEEDED], strict=True)}
    assert needed == {0: 1, 1: 1, 2: 1, 3: 0, 4: 0, 5: 0}, "the second group has nothing to learn"
    got_BL = updated["advantages"]
    want = TokenCredit(one.oar, one.tokenizer).reshape(
        1,
        host_BL,
        pad_rows(torch.linspace(0, 1, LENGTHS[row]) for row in batch.batch["row"]),
        torch.where(batch.batch["response_mask"].bool(), int(Segment.REASONING), int(Segment.OUTSIDE)),
        torch.tensor([int(Status.SCORED if needed[int(row)] else Status.NOT_NEEDED) for row in batch.batch["row"]]),
    )
    torch.testing.assert_close(got_BL, want.advantage_BL)
    assert not torch.allclose(got_BL, host_BL)
    torch.testing.assert_close(got_BL.sum(-1), host_BL.sum(-1), rtol=1e-4, atol=1e-5)
    assert metrics["oar/scored"] == [0.5]
    assert metrics["timing_s/oar"][0] > (0 if bypass else 6 * 0.5)
    assert REQUEST not in updated
    assert not [name for name in updated.keys() if name.startswith("oar_")], "nothing of ours travels to the update"  # noqa: SIM118
    assert nodes == [(("w0",), (), "fsdp")], "asked once, before the first pass"
    one._update_actor(batch)
    assert len(one.actor_rollout_wg.asked) == 1, "a second update with the same batch"
    assert one.actor_rollout_wg.updated[1]["advantages"].equal(got_BL)


def by_row(stepped):
    """The host's advantages in the order of sampling."""
    batch, host_BL, _ = stepped
    return host_BL[batch.batch["row"].argsort()]


def pad_rows(rows):
    return nested(rows).to_padded_tensor(0.0)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"])
def test_the_base_advantage_is_the_hosts_own(estimator):
    plain_one, one = trainer_of(estimator), trainer_of(base_estimator=estimator)
    want, got = (by_row(step(trainer, batch_of())) for trainer in (plain_one, one))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert one.config.algorithm.adv_estimator == "oar"


def test_another_estimator_runs_only_verls_methods(monkeypatch):
    one, seen = trainer_of("grpo"), []
    verls = host.RayPPOTrainer.__mro__[-2]
    for name in ("_balance_batch", "_compute_old_log_prob", "_update_actor"):
        monkeypatch.setattr(verls, name, lambda self, *given, name=name, **named: seen.append((name, given, named)))
    assert one.oar is None
    batch = object()
    assert one._balance_batch(batch, {}, "prefix", keep_minibatch=True) is None
    assert one._compute_old_log_prob(batch) is one._update_actor(batch) is None
    assert seen == [
        ("_balance_batch", (batch, {}, "prefix"), {"keep_minibatch": True}),
        ("_compute_old_log_prob", (batch,), {}),
        ("_update_actor", (batch,), {}),
    ]
    with pytest.raises(RuntimeError, match="outside of OAR's trainers"):
        host.core_algos.get_adv_estimator_fn("oar")()


def test_with_kl_in_the_reward_every_row_is_scored():
    one = trainer_of()
    one.config.algorithm.use_kl_in_reward = True
    assert one._needed_rows(batch_of()).all()


def test_ranks_get_equal_numbers_of_rows_to_score():
    """verl's own dealing, by tokens, gives one of the two ranks all four of them."""
    one = trainer_of(workers=Workers(ranks=2))
    lengths, rewards = (40, 37, 30, 31, 20, 21, 10, 11), (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    batch = batch_of(lengths, (*"abacdbdc",), rewards)
    one._balance_batch(batch, metrics := {})
    assert one._needed_rows(batch).view(2, 4).sum(-1).tolist() == [2, 2]
    rows = batch.batch["row"].view(2, 4)
    assert (rows.diff() > 0).all(), "in the order of sampling"
    tokens = batch.batch["attention_mask"].view(2, -1).sum(-1)
    assert metrics["global_seqlen/balanced_max"] == tokens.max()
    assert ours.SAMPLED_AT not in batch.batch


def test_workers_without_the_plugin_stop_the_run():
    one = trainer_of(workers=Workers(knows_oar=False))
    with pytest.raises(RuntimeError, match=r"step 1: .* returned none"):
        step(one, batch_of())
    assert isinstance(one.actor_rollout_wg, Workers), "verl's own workers are back"


def test_copies_on_the_engines_are_refused_by_name():
    copies = {"importance": "oar_p", "perturbation": {"backend": "rollout"}}
    with pytest.raises(OarConfigError, match=r"backend=rollout with RayPPOTrainer"):
        resolve(plain(trainer__use_v1=False, algorithm__oar=copies))
    with pytest.raises(OarConfigError, match=r"backend=rollout with RayPPOTrainer"):
        resolve(plain(algorithm__oar=copies), RAY_TRAINER)
    with pytest.raises(OarConfigError, match=r"backend=rollout with RayPPOTrainer"):
        resolve(plain(rollout={"nnodes": 1}, algorithm__oar=copies))  # of verl.experimental
    assert resolve(plain(trainer__use_v1=False)).importance == "fisher"
    assert resolve(plain(trainer__use_v1=False, algorithm__oar={"importance": "hybrid"})).copies is not None


def test_a_trainer_may_drop_rows_after_the_log_probs():
    """Scores belong to rows, and verl's trainers and others derive from the class in verl's module."""
    class_of_its_own = type("Own", (host.RayPPOTrainer,), {"_balance_batch": lambda self, batch, metrics: None})
    one, batch = trainer_of(cls=class_of_its_own), batch_of(rewards=(1.0, 0.0, 0.0, 1.0, 0.0, 1.0))
    old, _ = one._compute_old_log_prob(batch)
    batch = batch.union(old)[3:]
    batch.batch["advantages"], batch.batch["token_level_scores"] = (torch.ones(3, 7) for _ in range(2))
    metrics = one._update_actor(batch).meta_info["metrics"]
    assert metrics["oar/scored"] == [1.0]
    kept_BL = batch.batch["advantages"] * batch.batch["response_mask"]
    torch.testing.assert_close(kept_BL.sum(-1), batch.batch["response_mask"].sum(-1).float(), rtol=1e-4, atol=1e-5)
    assert (kept_BL.amax(-1) > 1).all()


def test_groups_are_dumped(tmp_path):
    one = trainer_of(home=tmp_path, dump={"dir": "dump"})
    step(one, batch_of())
    _, *lines = (tmp_path / "dump" / "step_000001.jsonl").read_text().splitlines()
    rows = [parse_response(line) for line in lines]
    assert {row.group for row in rows} <= {"a", "b"}
    first = next(row for row in rows if row.reward == 1.0 and row.group == "a")
    assert (len(first.token_ids), first.status) == (5, "scored")
    assert len(first.entropies) == len(first.log_probs) == 5
