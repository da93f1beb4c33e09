"""What the trainer does to a batch, with verl's own advantage functions and an in-memory stand-in for TransferQueue."""

import importlib
from dataclasses import asdict
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta

pytest.importorskip("verl")

import verl  # noqa: F401
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import get_trainer_cls

from benchmarks.tiny.words import make_tokenizer
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import response_seeds, step_seed
from oar_plugin.hosts.verl import offload, trainer_credit
from oar_plugin.hosts.verl import trainer as ours
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS, OFFLOAD, OffloadRecord
from oar_plugin.page.record import parse_response
from oar_plugin.passes import prediction
from oar_plugin.passes.prediction import hashed
from oar_plugin.passes.request import CHOSEN, IMPORTANCE, MEASURES, NEEDED, REQUEST, SECONDS, Request
from oar_plugin.runs.recipe import compose_recipe
from tests.asked import GIVEN
from tests.hosts.answer import answer_of
from tests.hosts.engine.world import nested
from tests.hosts.whole_run import RECIPES

PROMPT = 3  # tokens
TOKENIZER = make_tokenizer(384)
TOKENIZER.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CORRECTIONS = sorted(name for name, one in vars(RolloutCorrectionConfig).items() if isinstance(one, classmethod))
"""verl's presets of `algorithm.rollout_correction`: weights and rejection, decoupled and in bypass mode."""
BASE = importlib.import_module("verl.trainer.ppo.v1.trainer_base")


def picked(field, rows):
    if isinstance(field, NonTensorStack):
        return NonTensorStack(*(field.tolist()[row] for row in rows))
    parts = field.unbind()
    return nested([parts[row] for row in rows]) if field.is_nested else torch.stack([parts[row] for row in rows])


@cache
def recipe(mode):
    more = ["actor_rollout_ref.rollout.n=3", "actor_rollout_ref.rollout.temperature=0.6", "data.max_response_length=16"]
    more += ["actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", "trainer.default_local_dir=nowhere"]
    more += ["algorithm.norm_adv_by_std_in_grpo=True"]
    return compose_recipe(RECIPES / ("qwen2_5_7b_math" if mode == "sync" else f"qwen2_5_7b_{mode}"), "oar", more)


class World:
    """A trainer, its queue, and a batch, whose second group has nothing to learn."""

    def __init__(self, mode="sync", lengths=(5, 7, 4, 6, 5, 5), uids=(*"aaabbb",), rewards=(1, 0, 0, 1, 1, 1), **oar):
        self.lengths, self.uids, self.rewards = lengths, uids, rewards
        self.metrics = {}
        self.fields = {
            "uid": NonTensorStack(*self.uids),
            "response_mask": nested([torch.ones(length, dtype=torch.long) for length in self.lengths]),
            "rm_scores": self.rm_scores(),
            NEEDED: nested([torch.tensor([1]) for _ in self.lengths]),
            "prompts": nested([torch.arange(PROMPT) for _ in self.lengths]),
            "input_ids": nested([torch.randint(99, (PROMPT + length,)) for length in self.lengths]),
            "responses": nested([torch.arange(length) for length in self.lengths]),
            "raw_prompt": NonTensorStack(
                *([{"role": "user", "content": TOKENIZER.decode([*range(PROMPT)])}] for _ in uids)
            ),
            "reward_model": NonTensorStack(*({"ground_truth": "7" if row else None} for row in range(len(uids)))),
        }
        self.keys = [f"{uid}_{i}_0" for i, uid in enumerate(self.uids)]  # of the rows of `fields`
        tags = [{"seq_len": PROMPT + length} for length in self.lengths]
        self.batch = KVBatchMeta(keys=[*self.keys], partition_id="train", extra_info={}, tags=tags)
        config = OmegaConf.merge(recipe(mode), {"algorithm": {"oar": {"importance": "fisher"} | oar}})
        self.trainer = get_trainer_cls(mode)(config)
        config.actor_rollout_ref.actor.ppo_mini_batch_size = 1
        self.trainer.tokenizer, self.trainer.global_steps, self.trainer.timing_raw = TOKENIZER, 1, {}
        self.trainer.logger = SimpleNamespace(logger={})
        self.trainer._make_credit(self.trainer.oar)
        self.trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
        self.shares = []  # that rollout workers were told
        workers = [SimpleNamespace(oar_share=SimpleNamespace(remote=self.shares.append))]
        self.trainer.agent_loop_manager = SimpleNamespace(agent_loop_workers=workers)

    def kv_batch_get(self, keys, partition_id, select_fields):
        rows = [self.keys.index(key) for key in keys]
        found = {name: picked(self.fields[name], rows) for name in select_fields if name in self.fields}
        return TensorDict(found, len(rows))

    def kv_batch_put(self, keys, partition_id, fields):
        assert sorted(keys) == sorted(self.keys)
        rows = [keys.index(key) for key in self.keys]
        self.fields.update({name: picked(fields[name], rows) for name in fields.keys()})  # noqa: SIM118 - a TensorDict
        return self.batch

    def rm_scores(self):
        rows = [torch.zeros(length) for length in self.lengths]
        for row, reward in zip(rows, self.rewards, strict=True):
            row[-1] = reward
        return nested(rows)

    def report_from_actor(self, status=Status.SCORED, importance=None):
        """As an actor would: random importance unless it is said which; the last token is the answer."""
        generator = torch.Generator().manual_seed(0)
        segments = [torch.full((length,), int(Segment.REASONING), dtype=torch.int8) for length in self.lengths]
        for row in segments:
            row[-1] = Segment.ANSWER
        rows = [torch.rand(length, generator=generator) for length in self.lengths]
        rows = rows if importance is None else [torch.full_like(row, importance) for row in rows]
        statuses = status if isinstance(status, list) else [status] * len(rows)
        self.fields |= answer_of(rows, segments, statuses, self.trainer.oar)

    def report_from_engines(self, statuses):
        """As the agent loop puts it into the queue with each response."""
        self.report_from_actor(statuses)
        del self.fields[SECONDS]
        self.fields |= {theirs: self.fields.pop(name) for name, theirs in ENGINE_FIELDS.items()}
        done = {"copies": 4, "generated_at": 1e9, "done_at": [1e9] * 11}
        self.fields[OFFLOAD] = torch.stack([OffloadRecord(int(s), 1, **done).to_row() for s in statuses])

    def log_probs(self):
        self.batch = self.trainer._balance_batch(self.batch, self.metrics)
        self.trainer._compute_old_log_prob(self.batch, self.metrics)

    def credited(self):
        self.trainer._compute_advantage(self.batch, self.metrics)
        return self.fields["advantages"].to_padded_tensor(0.0)

    def host_advantage(self, estimator="grpo"):
        mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        return get_adv_estimator_fn(estimator)(
            token_level_rewards=self.rm_scores().to_padded_tensor(0.0),
            response_mask=mask.long(),
            index=np.array(self.uids, dtype=object),
        )[0]

    def needed(self):
        return [int(row) for row in self.fields[NEEDED].unbind()]


@pytest.fixture
def world(monkeypatch):
    def build(*args, **kwargs):
        made = World(*args, **kwargs)
        monkeypatch.setattr(ours, "tq", made)
        monkeypatch.setattr(BASE, "tq", made)
        return made

    return build


@pytest.mark.parametrize(("kl_in_reward", "marked"), [(False, [1, 1, 1, 0, 0, 0]), (True, [1] * 6)])
def test_rows_of_groups_without_a_signal_are_not_needed_unless_kl_is_in_the_reward(world, kl_in_reward, marked):
    one = world()
    one.trainer.config.algorithm.use_kl_in_reward = kl_in_reward
    one.trainer._mark_needed_rows(one.batch, {})
    assert one.needed() == marked


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"])
def test_the_base_advantage_is_the_hosts_own_and_its_total_is_kept(world, estimator):
    one = world(base_estimator=estimator)
    one.report_from_actor()
    got, want = one.credited(), one.host_advantage(estimator)
    assert one.trainer.timing_raw["oar"] >= 6 * 0.5, "seconds of the actor"
    torch.testing.assert_close(got.sum(-1), want.sum(-1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got[0], want[0])
    assert one.trainer.config.algorithm.adv_estimator == "oar"
    assert one.metrics["oar/scored"] == 1.0


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo"])
@pytest.mark.parametrize(("reward", "number"), GIVEN["equal"])
def test_equal_rewards_need_no_credit_though_rounding_gives_them_an_advantage(world, reward, number, estimator):
    rewards, uids = [reward] * number + [1, 0], [*"a" * number, "b", "b"]
    one = world(lengths=[4] * len(uids), uids=uids, rewards=rewards, base_estimator=estimator)
    one.trainer._mark_needed_rows(one.batch, {})
    assert one.needed() == [0] * number + [1, 1]
    one.report_from_actor([Status.SCORED if needed else Status.NOT_NEEDED for needed in one.needed()])
    got, host = one.credited()[:number], one.host_advantage(estimator)[:number]
    assert got.equal(host)
    assert host.any() == (number > 5), "a sum of five is exact"
    assert one.metrics["oar/scored"] == pytest.approx(2 / len(uids))


def test_a_prompts_only_session_needs_credit_whatever_its_trajectories(world):
    one = world(rewards=[0.9, 0.9], lengths=[5, 6], uids=["a"] * 2)
    one.keys = one.batch.keys = ["a_0_0", "a_0_1"]
    one.trainer._mark_needed_rows(one.batch, {})
    assert one.needed() == [1, 1]


def test_a_step_without_an_update_scores_nothing(world, monkeypatch):
    one, seen = world(), []
    one.trainer.config.trainer.critic_warmup = 2
    monkeypatch.setattr(BASE.PPOTrainer, "_compute_old_log_prob", lambda *_: seen.append(dict(one.batch.extra_info)))
    one.log_probs()
    assert one.credited().equal(one.host_advantage())
    assert REQUEST not in seen[0]
    assert [name for name in one.metrics if name.startswith("oar/")] == ["oar/lost_responses"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", GIVEN["rewards"])
def test_a_bad_reward_trains_as_in_the_host_and_is_told(world, caplog, case, late):
    """`late`: all rows are scored before advantages are known, as with KL in the reward."""
    one, bad = world(rewards=case["rewards"]), case["bad"]
    if not late:
        one.trainer._mark_needed_rows(one.batch, {})
        assert not any(one.needed()[row] for row in bad)
    one.report_from_actor([Status.SCORED if needed else Status.NOT_NEEDED for needed in one.needed()])
    got, host = one.credited(), one.host_advantage()
    assert torch.allclose(got[bad, 0], host[bad, 0], equal_nan=True)
    assert got.isfinite().all(-1).tolist() == [row not in bad for row in range(6)]
    matter = sum(row in bad or bool(needed) for row, needed in enumerate(one.needed()))
    assert one.metrics["oar/fallback/bad_reward"] == one.metrics["oar/fallback/any"] == len(bad) / matter
    assert [m for m in caplog.messages if "what does the reward function return?" in m]


def test_a_run_whose_responses_all_fall_back_is_exactly_the_hosts_and_says_so(world, caplog):
    one = world()
    one.report_from_actor(Status.NO_ANSWER)
    assert torch.equal(one.credited(), one.host_advantage())
    assert one.metrics["oar/fallback/no_answer"] == 1.0
    (message,) = [message for message in caplog.messages if message.startswith("OAR, step 1: 100%")]
    assert "no_answer 100%. no_answer: set answer_patterns" in message


def test_an_actor_that_returns_no_importance_stops_the_run(world):
    """Its workers have no plugin: plain GRPO for ever under the name of OAR."""
    with pytest.raises(RuntimeError, match=r"step 1: .* returned none"):
        world().credited()


@pytest.mark.parametrize("preset", CORRECTIONS)
def test_token_weights_and_every_rollout_correction_leave_each_other_alone(world, preset):
    """Mask, weights and metrics of the correction are the host's; the advantage of a token that it keeps is weighted."""
    correction = asdict(getattr(RolloutCorrectionConfig, preset)())
    fields = ("advantages", "response_mask", "rollout_is_weights")
    got, metrics = [], []
    for corrects, estimator in ((None, "oar"), (correction, "oar"), (correction, "grpo")):
        one = world()
        one.report_from_actor()
        one.trainer.config.algorithm.update(rollout_correction=corrects, adv_estimator=estimator)
        old = [torch.linspace(-1, -2, length) for length in one.lengths]
        apart = [torch.linspace(0, row, length) for row, length in enumerate(one.lengths)]  # the first: not at all
        one.fields["old_log_probs"] = nested(old)
        one.fields["rollout_log_probs"] = nested([a + b for a, b in zip(old, apart, strict=True)])
        compute = type(one.trainer)._compute_advantage if estimator == "oar" else BASE.PPOTrainer._compute_advantage
        compute(one.trainer, one.batch, one.metrics)
        got.append({name: one.fields[name].to_padded_tensor(0.0) for name in fields if name in one.fields})
        metrics.append({name: value for name, value in one.metrics.items() if name.startswith("rollout_corr/")})
    alone, both, hosts = got
    assert metrics[1] == metrics[2]
    assert bool(metrics[2]) is not correction["bypass_mode"]
    assert both.keys() == hosts.keys()
    for name in hosts.keys() - {"advantages"}:
        assert torch.equal(both[name], hosts[name])
    plain = world().host_advantage()
    weights = torch.where(plain == 0, 1.0, alone["advantages"] / plain)
    torch.testing.assert_close(both["advantages"], weights * hosts["advantages"])
    assert not torch.equal(both["advantages"], hosts["advantages"])
    rejects = bool(correction["rollout_rs"]) and not correction["bypass_mode"]
    assert (hosts["response_mask"].sum() < 32) == rejects, "the rows that are far apart are rejected"


def test_every_trajectory_of_a_session_gets_the_sessions_advantage(world):
    """verl does this for the estimator *named* grpo only; a name of our own must not lose it."""
    one = world(rewards=[1.0, 1.0, 0.0, 0.0], lengths=[5, 6, 4, 5], uids=["a"] * 4)
    one.keys = one.batch.keys = ["a_0_0", "a_0_1", "a_1_0", "a_2_0"]
    one.report_from_actor(Status.NO_ANSWER)
    got = one.credited()[:, 0]
    want = world(rewards=[1.0, 0.0, 0.0], lengths=[6, 4, 5], uids=["a"] * 3).host_advantage()[:, 0]
    torch.testing.assert_close(got, want[[0, 0, 1, 2]])


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("bypass", [False, True])
def test_the_request_rides_on_the_log_prob_pass_and_is_taken_off_again(world, monkeypatch, mode, bypass):
    one, seen = world(mode, seed=3), []
    trainer = one.trainer
    trainer.config.algorithm.rollout_correction = {"bypass_mode": bypass}
    trainer.config.actor_rollout_ref.rollout.max_model_len = 12

    def compute(self, batch, metrics):
        seen.append(dict(batch.extra_info))
        return batch

    monkeypatch.setattr(BASE.PPOTrainer, "_compute_old_log_prob", compute)
    if mode == "separate_async":
        trainer.local_trigger_step = 0
        trainer.actor_rollout_wg.save_model_to_cpu = lambda step: None
    trainer.actor_rollout_wg.compute_log_prob = lambda batch: seen.append(dict(batch.extra_info))
    for step in (1, 2):
        seen.clear()
        trainer.global_steps = step
        one.log_probs()
        assert REQUEST not in one.batch.extra_info
        (request,) = (info[REQUEST] for info in seen if REQUEST in info)
        assert request["importance_only"] is bypass
        assert (request["temperature"], request["seed"], request["max_length"]) == (0.6, step_seed(3, step), 12)
        assert len(seen) == (2 if bypass else 1)


# ---- rows dealt out to ranks


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_get_equal_numbers_of_rows_to_score_in_the_order_of_sampling(world, monkeypatch, padded):
    """verl's own dealing, by tokens, gives one of the two ranks all four of them."""
    lengths = [40, 37, 30, 31, 20, 21, 10, 11]
    rewards, uids = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [*"abacdbdc"]  # a and d have a signal
    if padded:
        lengths[7], uids[7] = 1, "pad"
    one = world(lengths=lengths, rewards=rewards, uids=uids)
    one.trainer.config.actor_rollout_ref.rollout.n = 2
    one.trainer.actor_rollout_wg._dispatch_info["actor"] = [0, 0, 1, 1]
    if padded:  # verl fills up the batch with a row without a response of its own
        tags = [*one.batch.tags[:7], {"seq_len": 128, "is_padding": True}]
        filled, one.batch = (KVBatchMeta(one.keys[:n], partition_id="train", tags=tags[:n]) for n in (8, 7))
        monkeypatch.setattr(BASE, "upsample_batch_to_divisible_size", lambda batch, multiple, eos: filled)
    batch = one.trainer._balance_batch(one.batch, one.metrics)
    assert one.metrics["oar/lost_responses"] == (1 / 8 if padded else 0), "fillers are nobody's responses"
    marked = dict(zip(one.keys, one.needed(), strict=True))
    assert one.needed() == [1, 0, 1, 0, 1, 0, 1, 0]
    places = [one.keys.index(key) for key in batch.keys]
    assert sorted(places) == list(range(8))
    for rank in (places[:4], places[4:]):
        assert rank == sorted(rank)
        assert sum(marked[one.keys[place]] for place in rank) == 2
    tokens = [tag["seq_len"] for tag in batch.tags]
    assert one.metrics["global_seqlen/balanced_max"] == max(sum(tokens[:4]), sum(tokens[4:]))
    assert one.trainer.timing_raw["oar"] > 0


def test_chosen_responses_without_an_answer_give_no_labels_and_are_counted(world):
    one = world(importance="oar_p", amortize={"share": 0.5, "units": 2})
    one.fields[NEEDED] = nested([torch.tensor([CHOSEN if row < 3 else 0]) for row in range(6)])
    one.report_from_actor([Status.SCORED, Status.NO_ANSWER, Status.LEARNING, *[Status.NOT_NEEDED] * 3])
    one.credited()
    assert one.metrics["oar/amortize/unlabelled"] == pytest.approx(1 / 3)
    assert (one.trainer._choice.labels, one.trainer._choice.responses) == (4, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_driver_chooses_the_same_rows_for_any_number_of_ranks_and_spreads_them(world, monkeypatch, ranks):
    monkeypatch.setattr(prediction, "ENOUGH", (0, 0))
    monkeypatch.setattr(prediction, "FEWEST", 1)
    uids, rewards = [*"abcdefgh"] * 2, [1] * 8 + [0] * 5 + [1] * 3  # five groups of eight have a signal
    torch.manual_seed(0)
    one = world(
        uids=uids,
        rewards=rewards,
        lengths=range(4, 20),
        importance="oar_p",
        amortize={"share": 0.25, "units": 2},
        seed=0,
    )
    one.trainer.actor_rollout_wg._dispatch_info["actor"] = [*range(ranks)]
    monkeypatch.setattr(BASE.PPOTrainer, "_balance_batch", lambda self, batch, *_, **__: batch)
    one.batch = one.trainer._balance_batch(one.batch, one.metrics)
    needed = one.needed()
    assert [row for row, mark in enumerate(needed) if mark] == [*range(5), *range(8, 13)]
    packed, order = one.fields["input_ids"], [*range(5), *range(8, 13)]
    hashes = [
        hashed(response_seeds(packed[row], torch.zeros_like(packed[row]), 1, step_seed(0, 1))).item() for row in order
    ]
    chosen = {order[place] for place in np.argsort(hashes)[:3]}  # of ten
    assert {row for row, mark in enumerate(needed) if mark == CHOSEN} == chosen
    placed = [one.keys.index(key) in chosen for key in one.batch.keys]
    each = len(placed) // ranks
    counts = [sum(placed[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("rewards", [[1.0] * 6, [1.0, 0.0] * 3])
def test_where_no_row_differs_from_the_others_verls_own_dealing_stays(world, rewards):
    # There are two ways, and verl takes the other one.
    ours, verls = (world(rewards=rewards, lengths=[7, 3, 1, 9, 3, 7]) for _ in range(2))
    for one in (ours, verls):
        one.trainer.actor_rollout_wg._dispatch_info["actor"] = [0, 1]
    BASE.PPOTrainer._balance_batch(verls.trainer, verls.batch, {})
    assert ours.trainer._balance_batch(ours.batch, {}).keys == verls.batch.keys != ours.keys


# ---- around the steps


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_worker_and_server_is_asked_for_its_plugin_before_anything_else(world, monkeypatch, mode):
    one, calls = world(mode), []
    trainer = one.trainer
    trainer.config.actor_rollout_ref.actor.strategy = "fsdp2"
    trainer.actor_rollout_wg.workers = ["w0", "w1"]

    def manager(*servers):
        return SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[server]) for server in servers])

    trainer.llm_server_manager = manager("hybrid 0", "hybrid 1")
    servers = ["hybrid 0", "hybrid 1"]
    if mode == "separate_async":
        trainer.standalone_server_manager = manager("alone")
        servers.append("alone")
    monkeypatch.setattr(trainer_credit, "check_nodes", lambda *asked: calls.append(asked))
    monkeypatch.setattr(type(trainer).host, "on_init_end", lambda self: calls.append("verl"))
    trainer.on_init_end()
    assert calls == [(["w0", "w1"], servers, "fsdp", trainer.oar), "verl"]


def test_groups_are_dumped_with_the_advantage_before_reshaping(world, tmp_path):
    one = world(dump={"dir": str(tmp_path / "dump")})
    one.batch.tags[2]["is_padding"] = True
    one.report_from_actor()
    plain = one.host_advantage()
    one.credited()
    assert one.metrics["oar/dump_failed"] == 0
    rows = [parse_response(line) for line in (tmp_path / "dump" / "step_000001.jsonl").read_text().splitlines()[1:]]
    assert [row.uid for row in rows] == ["a_0_0", "a_1_0", *(f"b_{row}_0" for row in (3, 4, 5))]
    assert (rows[1].token_ids, rows[1].reward, rows[1].advantage) == ([*range(7)], 0.0, plain[1, 0].item())
    assert sum(rows[0].weights) == pytest.approx(5, rel=1e-4)


# ---- importance from the rollout engines


@pytest.fixture
def offloading(world, monkeypatch):
    """A world after the log-prob pass, with these statuses from the engines for the group with a signal. `requests` are those
    that the actor got; it answers 7 everywhere."""

    def build(*statuses, share=None, **perturbation):
        # A gate whose weights keep the order of the scores.
        perturbation["backend"] = "rollout"
        monkeypatch.setattr(ours, "switch_on", Mock())
        one = world(importance="oar_p", gate="bi_level", perturbation=perturbation, amortize={"share": share})
        one.report_from_engines([*statuses] + [Status.NOT_NEEDED] * 3)
        one.requests = []

        def compute(self, batch, metrics):
            if REQUEST in batch.extra_info:
                one.requests.append(dict(batch.extra_info[REQUEST]))
                one.report_from_actor(importance=7.0)
            return batch

        monkeypatch.setattr(BASE.PPOTrainer, "_compute_old_log_prob", compute)
        one.log_probs()
        one.order = one.fields[ENGINE_FIELDS[IMPORTANCE]].unbind()[0][:4].argsort()
        return one

    return build


@pytest.mark.parametrize("failed", [False, True])
def test_what_engines_scored_or_what_has_no_fallback_needs_nothing_of_the_actor(offloading, failed):
    """Without a fallback the response keeps its plain advantage."""
    settings = {"fallback": "none"} if failed else {}
    one = offloading(Status.SCORED, Status.ENGINE_FAILED if failed else Status.SCORED, Status.SCORED, **settings)
    assert one.requests == []
    got, want = one.credited(), one.host_advantage()
    torch.testing.assert_close(got.sum(-1), want.sum(-1), rtol=1e-4, atol=1e-5)
    assert (got[0, :4].argsort() == one.order).all()
    assert torch.equal(got[1], want[1]) == failed
    assert one.metrics["oar/scored"] == pytest.approx((3 - failed) / 6)
    assert one.metrics["oar/fallback/engine_failed"] == pytest.approx(failed / 3)
    assert one.metrics["oar/offload/left_for_actor"] == 0
    assert one.metrics["oar/offload/hidden_share"] == 1


@pytest.mark.parametrize(("settings", "fallback"), [({}, "fisher"), ({"fallback": "entropy"}, "entropy")])
def test_what_an_engine_could_not_score_the_actor_does(offloading, settings, fallback):
    one = offloading(Status.SCORED, Status.TIMED_OUT, Status.NO_ANSWER, **settings)
    (request,) = one.requests
    assert Request.from_dict(request).importance == fallback
    assert one.needed() == [0, 1, 0, 0, 0, 0]
    got = one.credited()
    assert (got[0, :4].argsort() == one.order).all()
    assert torch.equal(got[2], one.host_advantage()[2])  # no answer: plain
    assert one.metrics["oar/fallback/no_answer"] == pytest.approx(1 / 3)
    assert one.metrics["oar/fallback/constant"] == pytest.approx(1 / 3)  # the made-up actor says 7 everywhere
    assert one.metrics["oar/offload/fault/timed_out"] == 1
    assert one.metrics["oar/offload/left_for_actor"] == pytest.approx(1 / 6)


def test_where_scores_are_predicted_the_actor_also_gets_the_rows_that_engines_scored(offloading):
    """It learns from them, and its weights are the ones that count."""
    one = offloading(Status.SCORED, Status.NOT_SCORED, Status.NO_ANSWER, share=0.5)
    (request,) = one.requests
    assert Request.from_dict(request).importance == "oar_p"
    assert one.needed() == [1, 1, 0, 0, 0, 0]
    one.report_from_actor([Status.SCORED if needed else Status.NOT_NEEDED for needed in one.needed()])
    more = torch.tensor([1.0, float("nan"), float("nan"), 3.0])
    one.fields[MEASURES] = nested([torch.cat([row, more]) for row in one.fields[MEASURES].unbind()])
    one.credited()
    assert one.metrics["oar/offload/left_for_actor"] == pytest.approx(1 / 6)
    assert one.metrics["oar/amortize/predicted"] == pytest.approx(1 / 3), "of the batch's responses"
    assert one.metrics["oar/amortize/learning_steps"] == 3
    assert one.metrics["oar/amortize/unlabelled"] == 0
    assert one.shares == [1.0], "in the next step all, for there are few labels"
    assert "oar/amortize/explained" not in one.metrics


def test_the_offload_sets_what_it_needs_in_verls_configuration(monkeypatch):
    registered = []
    server = importlib.import_module("oar_plugin.hosts.verl.rollout_server")
    monkeypatch.setattr(server, "register", lambda *settings: registered.append(settings))
    rollout = {"agent": {"agent_loop_manager_class": None}, "scheduling_policy": "fcfs"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    OmegaConf.set_struct(config, True)
    offload.switch_on(config, OarConfig.parse({"perturbation": {"max_in_flight": 5}}))
    assert registered == [(5, 0.15)]
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == offload.MANAGER
    assert config.actor_rollout_ref.rollout.scheduling_policy == "priority"
