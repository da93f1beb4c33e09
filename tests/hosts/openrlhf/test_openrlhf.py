"""OpenRLHF's own code, patched, with OAR: log-probs as without, advantages by the front door's credit."""

import json
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import oar_plugin
from oar_plugin.config import OarConfigError
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.openrlhf import OarAdvantage
from oar_plugin.page.sources import read
from oar_plugin.passes.plain import PlainHost
from tests.asked import GONE
from tests.hosts.engine import world
from tests.hosts.openrlhf import batch, host
from tests.limits import PROCESS_S
from tests.processes import ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    world.make_model(path)
    AutoModelForCausalLM.from_pretrained(path).bfloat16().save_pretrained(path)  # as OpenRLHF reads it
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return host.Host(host.unpack(tmp_path_factory.mktemp("released")))


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    site = host.unpack(tmp_path_factory.mktemp("patched"))
    patch = Path(__file__).parents[3] / "patches" / f"openrlhf-{host.VERSION}.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=site, check=True)  # outside of a repository, as `patch` would
    return host.Host(site)


def plugin_words(**settings):
    return *batch.PLUGIN, json.dumps({"answer_patterns": ["hash"], **settings})


def experiences_of(one, folder, *words, packing=False, step=0, change=lambda samples: None, **groups):
    """What `make_experience_batch` returns for the rollouts, and the experience maker."""
    args = one.args(*batch.words(folder, *words))
    args.ds.packing_samples = packing  # OpenRLHF's command line asks for flash attention with it
    made = batch.maker(one, args, batch.actor(one, folder, packing), step, **groups)
    with one.here():
        samples = batch.rollouts(one)
        change(samples)
        return made.make_experience_batch(samples), made


def rows(experiences, name="advantages"):
    """A field of each response, as long as it is."""
    lengths = [length - 1 for e in experiences for length in e.attention_mask.sum(-1).tolist()]
    fields = (row for e in experiences for row in getattr(e, name))
    return [row[:length] for row, length in zip(fields, lengths, strict=True)]


def front_door(folder, experiences, **settings):
    """Credit of every response by itself."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), world.make_tokenizer()
    given = {
        "importance": "fisher",
        "tokenizer": tokenizer,
        "answer_patterns": ["hash"],
        "temperature": 0.7,
        **settings,
    }
    whole = [row for e in experiences for row in e.sequences]
    for ids, own in zip(whole, rows(experiences, "action_mask"), strict=True):
        own = torch.cat([own.new_zeros(1), own])[None]
        masks = {"response_mask": own, "attention_mask": own + 1}
        yield oar_plugin.importance(model, ids[None, : own.shape[1]], **masks, **given)


def assert_same(want, got):
    assert len(want) == len(got) == 4
    for a, b in zip(want, got, strict=True):
        for name in ("sequences", "action_log_probs", "advantages", "returns", "rewards"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_without_a_plugin_nothing_changes(plain, patched, folder):
    (want, _), (got, _) = experiences_of(plain, folder), experiences_of(patched, folder)
    assert_same(want, got)
    assert [list(e.info) for e in want] == [list(e.info) for e in got]


def test_with_even_weights_advantages_are_openrlhfs_bit_for_bit(plain, patched, folder):
    words = ["--train.micro_batch_size", "3"]  # else its rows come in other micro-batches, and round otherwise
    words += ["--reward.stop_properly_penalty_coef", "0.5"]  # OpenRLHF changes rewards in place
    want, _ = experiences_of(plain, folder, *words)
    got, _ = experiences_of(patched, folder, *words, *plugin_words(beta=0))
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a.advantages, b.advantages)
        assert torch.equal(a.returns, b.returns)
    assert torch.equal(got[0].info["oar/weight_max"], torch.ones(3))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 1e-5),
        # It reads the difference of two distributions: with noise of 1e-3 the rounding of some CPUs is 2e-4 of it.
        ({"importance": "oar_g", "gate": "bi_level", "sigma": 0.1}, 1e-4),
        ({"importance": "oar_p", "perturbation": {"replacement": "sampled"}}, 1e-5),
        ({"importance": "python:tests.own_importance:Saliency"}, 1e-4),
        # The end of a response, and of nothing else; row 3 goes on behind its answer.
        ({"answer_patterns": [r"regex:#### (\d+)\s?$"]}, 1e-5),
    ],
    ids=lambda value: value.get("importance", "".join(value) or "fisher") if isinstance(value, dict) else "",
)
def test_one_forward_gives_log_probs_and_the_front_doors_credit(plain, patched, folder, settings, most, packing):
    want, _ = experiences_of(plain, folder, packing=packing)
    got, made = experiences_of(patched, folder, *plugin_words(**settings), packing=packing, step=4)
    scores = [row for output in made.plugin_outputs for row in output]
    status = made.advantage_plugin._status_B.tolist()
    unscored = batch.UNSCORED | ({3: "no_answer"} if "answer_patterns" in settings else {})
    for row, credit in enumerate(front_door(folder, got, step=5, **settings)):
        torch.testing.assert_close(rows(got, "action_log_probs")[row], rows(want, "action_log_probs")[row])
        expected, credited = rows(want)[row], credit.importance[0, 1:]
        if row < 8 and row not in unscored:
            assert status[row] == Status.SCORED
            assert ((scores[row][: len(credited)] - credited).abs().max() / credited.max()).item() < most
            expected = expected * credit.weights[0, 1:]
            assert len(expected.unique()) > 2
        else:
            assert Status(status[row]).name.lower() == unscored.get(row, "not_needed")
            assert not scores[row].any()
        torch.testing.assert_close(rows(got)[row], expected, rtol=10 * most, atol=1e-5)


@pytest.mark.parametrize("flags", [[], ["--train.dynamic_batch_enable"]], ids=["fixed", "dynamic"])
def test_metrics_reach_the_log_after_experiences_are_split_and_merged_anew(patched, folder, monkeypatch, flags):
    words = ["--train.max_tokens_per_gpu", "70"] if flags else []
    experiences, made = experiences_of(patched, folder, *flags, *words, *plugin_words())
    want = {name: value[0].item() for name, value in experiences[0].info.items() if name.startswith("oar/")}
    assert want["oar/scored"] == pytest.approx(5 / 12)
    assert want["oar/fallback/any"] == pytest.approx(3 / 8)
    nothing = SimpleNamespace(
        args=made.args, ring_attn_group=None, get_last_lr=lambda: [0], get_grad_norm=lambda _: 0.0
    )
    nothing.backward = nothing.optimizer_step = Mock()
    monkeypatch.setattr(patched.ppo_actor, "torch_dist_barrier_and_cuda_sync", Mock())
    monkeypatch.setattr(patched.ppo_actor, "NaiveReplayBuffer", Mock(return_value=Mock(dynamic_optimizer_step=[1])))
    with patched.here():
        if flags:
            experiences = patched.experience.balance_experiences(experiences, made.args)
        items = [item for e in experiences for item in patched.experience.split_experience_batch(e)]
        items = patched.experience.remove_padding_in_sequences(items)
        trainer = patched.ppo_actor.ActorPPOTrainer(
            nothing, made.actor_model_group.actors[0].actor, None, None, nothing
        )
        tokens = {"batch_num_tokens": 1.0, "global_batch_size": 1.0, "dp_size": 1}
        found = trainer.training_step(patched.experience.make_experience_batch(items), 0.0, 0, tokens)
    logged = {name: value.mean().item() for name, value in found["metrics"].items() if name.startswith("oar/")}
    assert logged == pytest.approx(want)
    assert {found["weights"][name] for name in logged} == {"sample"}


@pytest.mark.parametrize("name", ["PPOTrainer", "TrainingActor"])
def test_both_trainers_take_this_way_and_say_which_step_it_is(patched, folder, monkeypatch, name):
    module = patched.trainer if name == "PPOTrainer" else patched.asynchronous
    queues = {} if name == "PPOTrainer" else dict.fromkeys(["vllm_lock", "rollout_queue", "rollout_slots"])
    monkeypatch.setattr(module, "prepare_datasets", lambda *_: (None, None, 1))
    args = patched.args(*batch.words(folder, *plugin_words(dump={"dir": "credit", "every": 7, "groups": 3})))
    actors = batch.maker(patched, args, batch.actor(patched, folder)).actor_model_group
    kind = getattr(module, name).__ray_metadata__.modified_class
    trainer = kind(str(folder), SimpleNamespace(args=args), actors, None, None, None, None, **queues)
    trainer.actor_model_group = SimpleNamespace(async_run_method_batch=lambda **_: [])
    trainer.ppo_train = lambda step: {}
    with patched.here():
        samples = batch.rollouts(patched)
        samples[5].action_mask.zero_()  # as where a prompt takes all the room: it is left out
        module.ray.get, kept = lambda refs: refs, module.ray.get
        trainer.train_step(samples, 6)
        module.ray.get = kept
    (file,) = (folder / "ckpt" / "credit").glob("*.jsonl")
    assert file.name == "step_000007.jsonl"
    loaded = read([file.parent])
    assert [response.group for response in loaded.items] == ["0"] * 4 + ["1"] * 3
    file.unlink()


def test_with_unknown_advantages_every_response_is_scored(patched, folder):
    def unrewarded(samples):
        for sample in samples:
            sample.rewards = None

    class Rewarder:
        def execute_batch(self, method_name, lists, begin, end):
            return [torch.tensor(batch.RIGHT[3 * at : 3 * at + 3]).float() for at in range(begin, end)]

    made = experiences_of(patched, folder, *plugin_words(), change=unrewarded, reward=batch.Group(Rewarder()))[1]
    assert Status.NOT_NEEDED not in made.advantage_plugin._status_B.tolist()


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo"])
def test_equal_rewards_need_no_credit_though_rounding_gives_them_an_advantage(plain, patched, folder, estimator):
    def equal(samples):
        for sample in samples:
            sample.rewards.fill_(0.7)

    words = ["--rollout.n_samples_per_prompt", "12", "--algo.advantage.estimator", estimator]
    want, _ = experiences_of(plain, folder, *words, change=equal)
    got, made = experiences_of(patched, folder, *words, *plugin_words(), change=equal)
    assert_same(want, got)
    assert any(row.any() for row in rows(got))
    assert made.advantage_plugin._status_B.eq(Status.NOT_NEEDED).all()


def test_a_bad_reward_leaves_its_group_as_openrlhf_has_it(plain, patched, folder):
    def unrewarded(samples):
        samples[1].rewards[0] = torch.nan

    want, _ = experiences_of(plain, folder, change=unrewarded)
    got, made = experiences_of(patched, folder, *plugin_words(), change=unrewarded)
    assert all(map(partial(torch.allclose, equal_nan=True), rows(got)[:4], rows(want)[:4]))
    assert got[0].info["oar/fallback/bad_reward"][0].item() == pytest.approx(4 / 8)
    assert made.advantage_plugin._status_B[:4].eq(Status.NOT_NEEDED).all(), "nothing is computed for them"


def test_other_experiences_than_those_of_the_step_are_refused(patched, folder):
    """Segments and statuses of the step are kept between the calls, and would be taken for those of other responses."""
    experiences, made = experiences_of(patched, folder, *plugin_words())
    with pytest.raises(RuntimeError, match=r"step 1: .*\(9, \d+\), \(12, .* all samples of the step"):
        made.advantage_plugin.update_advantages(experiences[:-1], made.plugin_outputs)


def test_kl_as_a_loss_leaves_advantages_as_they_are(patched, folder):
    class Reference:
        def execute_batch(self, method_name, lists, begin, end):
            return [mask * 9.0 for mask in lists["action_mask"][begin:end]]

    words = ["--algo.kl.init_coef", "0.5", "--algo.kl.use_loss"]
    want, _ = experiences_of(patched, folder, *plugin_words())
    got, made = experiences_of(patched, folder, *words, *plugin_words(), initial=batch.Group(Reference()))
    assert_same(want, got)
    assert made.advantage_plugin._status_B.tolist().count(Status.NOT_NEEDED) == 4


@pytest.mark.parametrize(("micro_batch", "most"), [("2", 1), ("12", 60), ("12", 1)])
@pytest.mark.parametrize("flags", [[], ["--train.dynamic_batch_enable"]], ids=["fixed", "dynamic"])
def test_backward_passes_are_as_large_as_the_updates(patched, folder, monkeypatch, flags, micro_batch, most):
    passes, forward = [], PlainHost._forward

    def seen(one, numbers, packed, work):
        passes.append(packed.offsets.diff().tolist())
        return forward(one, numbers, packed, work)

    monkeypatch.setattr(PlainHost, "_forward", seen)
    words = ["--train.max_tokens_per_gpu", str(most), "--rollout.max_tokens_per_gpu", "1000", *flags]
    experiences, _ = experiences_of(patched, folder, "--train.micro_batch_size", micro_batch, *words, *plugin_words())
    assert sum(map(len, passes)) == 5
    most = most if flags else int(micro_batch) * max(one.sequences.shape[1] for one in experiences)
    assert all(len(lengths) == 1 or len(lengths) * max(lengths) <= most for lengths in passes)


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (["--ds.ring_attn_size", "2"], {}, "--ds.ring_attn_size=2: "),
        (["--ds.tensor_parallel_size", "2"], {}, "--ds.tensor_parallel_size=2: "),
        (["--ds.zero_stage", "1"], {}, "--ds.zero_stage=1: "),
        (["--actor.policy_loss_type", "gspo"], {}, "--actor.policy_loss_type=gspo: "),
        (["--algo.kl.init_coef", "0.01"], {}, "--algo.kl.init_coef=0.01: "),
        (["--algo.advantage.estimator", "reinforce", "--algo.advantage.gamma", "0.9"], {}, "advantage.gamma=0.9: "),
        (["--ds.use_liger_kernel"], {}, "--ds.use_liger_kernel=True: "),
        (["--ds.deepcompile"], {}, "--ds.deepcompile=True: "),
        (["--algo.advantage.estimator", "gae"], {}, "--algo.advantage.estimator=gae: "),
        ([], {"perturbation": {"backend": "rollout"}, "importance": "oar_p"}, "_args.perturbation.backend=rollout: "),
        ([], {"amortize": {"share": 0.5}}, "_args.amortize.share=0.5: nothing is predicted"),
        ([], {"base_estimator": "rloo"}, "_args.base_estimator=rloo: "),
        ([], {"importence": "fisher"}, "_args.importence='fisher': unknown key; did you mean"),
        ([], {"tau": 2}, "--algo.advantage.plugin_args.tau=2: "),
        *(([], given, ": was removed in oar_plugin 0.4.0: ") for given in GONE),
        ([], {"answer_patterns": ["x"]}, "--algo.advantage.plugin_args.answer_patterns[0]='x': "),
        ([*batch.PLUGIN, "importance=fisher"], None, "_args=importance=fisher: not a JSON object"),
        ([*batch.PLUGIN, "[1]"], None, "_args=[1]: not a JSON object"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(patched, folder, words, settings, message):
    args = patched.args(*batch.words(folder, *words, *(() if settings is None else plugin_words(**settings))))
    with pytest.raises(OarConfigError, match=r"allowed|less than|removed") as refused:
        patched.maker.load_advantage_plugin(args, world.make_tokenizer())
    assert message in str(refused.value)


def test_models_that_see_images_are_refused(patched, folder, tmp_path):
    read_as = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(read_as | {"vision_config": {}}))
    with pytest.raises(OarConfigError, match="it sees images"):
        OarAdvantage(patched.args(*batch.words(tmp_path, *plugin_words())), world.make_tokenizer())


@pytest.mark.slow
@pytest.mark.timeout(2 * PROCESS_S)
def test_deepspeed_gives_the_same_scores_and_trains_as_if_nobody_had_scored(patched, folder):
    pytest.importorskip("deepspeed")
    from tests.hosts.openrlhf.worker import CASES, RANKS

    results = ranks("tests.hosts.openrlhf.worker", patched.site, folder, DS_ACCELERATOR="cpu")

    for name, given in CASES.items():
        for rank, result in enumerate(results):
            trained = [result[stage, name][1] for stage in (2, 3)]
            assert not result[3, name][2], "these are never sharded"
            if not given.get("lora"):
                for stage, weights in zip((2, 3), trained, strict=True):
                    assert all(map(torch.equal, weights, result[stage, "no scores"][1])), (stage, name)
            if not given.get("scores", True):
                continue
            # In this process: one model, without DeepSpeed.
            settings = {"importance": given["importance"]} if "importance" in given else {}
            args = patched.args(*batch.words(folder, *plugin_words(**settings)))
            made = batch.maker(patched, args, batch.actor(patched, folder, wide=False))
            with patched.here():
                samples = made.split_rollout_samples(batch.rollouts(patched))
                inputs = made.advantage_plugin.actor_inputs(made, samples)
                for place, at in enumerate(RANKS[rank]):
                    tensors = samples[at].sequences, samples[at].action_mask, samples[at].attention_mask
                    want = made.actor_model_group.actors[0].forward(*tensors, plugin_inputs=inputs[at])
                    assert want[1].any() == (at < 2)
                    for stage in (2, 3):
                        assert all(map(torch.equal, want, result[stage, name][0][place])), (stage, name, at)
