"""Real verl, real Ray, real vLLM on a CPU, with OAR. Minutes, not seconds."""

import json

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from tests.hosts import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("verl")
    tiny_run.make_assets(path)
    return path


def check(steps, expected_steps):
    """What every step of a healthy run with OAR shows."""
    assert [step["step"] for step in steps] == expected_steps
    with_signal = [step for step in steps if step["oar/scored"] > 0]
    assert with_signal, "eight groups, and in every step all of them without a signal?"
    for step in with_signal:
        assert 0 < step["actor/grad_norm"] < 100
        assert step["timing_s/oar"] > 0
        assert step["oar/answer_found"] > 0.8, "the model writes its answer behind ####"
        assert step["oar/fallback/non_finite"] == step["oar/fallback/not_scored"] == 0
        assert step["oar/fallback/any"] < 0.3
        assert step["oar/scored"] <= 1
        assert 0.1 < step["oar/ess_ratio"] < 1, "weights are neither even nor on one token"
        assert 0.1 < step["oar/top10_mass"] < 1
        assert 1 < step["oar/weight_max"] < 10


@pytest.fixture(scope="module")
def three_steps(folder):
    return tiny_run.run(
        folder,
        "three",
        "trainer.total_training_steps=3",
        "trainer.save_freq=2",
        f"algorithm.oar.dump_dir={folder}/three/dump",
        "algorithm.oar.dump_responses=2",
    )


def test_three_steps_with_the_one_line(three_steps):
    check(three_steps, [1, 2, 3])
    for step in three_steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the actor's weights"


def test_only_rows_with_an_advantage_are_scored(three_steps):
    """Four rows a group, eight groups: a group is scored as a whole or not at all."""
    assert all((step["oar/scored"] * 32) % 4 == 0 for step in three_steps)
    assert min(step["oar/scored"] for step in three_steps) < 1


def test_responses_are_dumped_for_people_to_look_at(three_steps, folder):
    rows = [json.loads(line) for line in (folder / "three" / "dump" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        length = len(row["tokens"])
        assert all(len(row[key]) == length for key in ("segments", "importance", "weights", "advantage"))
        assert sum(row["weights"]) == pytest.approx(length, rel=1e-4)
        assert row["status"] == "scored"
        assert "####" in "".join(row["tokens"])


def test_a_run_resumes_from_its_checkpoint(three_steps, folder):
    steps = tiny_run.run(
        folder,
        "three",
        "trainer.total_training_steps=4",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={folder}/three/checkpoints/global_step_2",
    )
    check(steps, [3, 4])


def test_asynchronous_packed_dynamic_with_kl_in_reward_and_correction(folder):
    """colocate_async, packed sequences, dynamic batches, checkpointing, RLOO, reference model, rollout correction."""
    steps = tiny_run.run(
        folder,
        "async",
        "trainer.total_training_steps=2",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.sampler.custom_sampler.name=QuickReplayBufferAsync",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=512",
        "algorithm.use_kl_in_reward=True",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.oar.base_estimator=rloo",
    )
    check(steps, [1, 2])
    assert all(step["oar/scored"] == 1 for step in steps), "with KL in the reward no advantage is known to be zero"


def test_bypass_mode_lora_and_the_published_estimator(folder):
    steps = tiny_run.run(
        folder,
        "bypass",
        "trainer.total_training_steps=2",
        "algorithm.rollout_correction.bypass_mode=True",
        "actor_rollout_ref.model.lora_rank=4",
        "algorithm.oar.base_estimator=reinforce_plus_plus_baseline",
        "algorithm.oar.importance=oar_g",
        "algorithm.oar.warmup_steps=1",
    )
    check(steps, [1, 2])
