"""Real verl, real Ray, real vLLM on a CPU, with OAR. Minutes, not seconds."""

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("vllm")

from transformers import AutoTokenizer

import oar_plugin
from tests.hosts.engine import world
from tests.hosts.whole_run import RECIPES, check, dumped, loads_adapters, smoke, whole_run

pytestmark = whole_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verl")


OWN = {
    "importance": "python:tests.own_importance:Saliency",
    "gate": "python:tests.own_importance:upper_half",
    "answer_patterns": ["boxed", "hash"],
}


@pytest.fixture(scope="module")
def three_steps(folder):
    """The smoke test of the standard recipe, a step longer, with an importance and a gate of one's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RECIPES.parent))
        return smoke(
            "qwen2_5_7b_math",
            folder,
            "trainer.total_training_steps=3",
            "trainer.test_freq=3",
            f"algorithm.oar.importance={OWN['importance']}",
            f"algorithm.oar.gate={OWN['gate']}",
            f"algorithm.oar.dump_dir={folder}/dump",
            "algorithm.oar.dump_responses=2",
        )


def test_three_steps_of_the_standard_recipe(three_steps):
    check(three_steps, [1, 2, 3])
    for step in three_steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the actor's weights"
    assert any(name.startswith("val-core/") for name in three_steps[-1]), "validated as the recipe would"


def test_only_rows_with_an_advantage_are_scored(three_steps):
    """Four rows a group, eight groups: a group is looked at as a whole or not at all."""
    for step in three_steps:
        looked_at = step["oar/scored"] * 32 / (1 - step["oar/fallback/any"])
        assert round(looked_at) % 4 == 0
        assert looked_at == pytest.approx(round(looked_at), abs=1e-3)
    assert min(step["oar/scored"] for step in three_steps) < 1


def test_responses_are_dumped_for_people_to_look_at(three_steps, folder):
    rows = dumped(folder)
    assert len(rows) == 2
    for row in rows:
        length = len(row["tokens"])
        assert all(len(row[key]) == length for key in ("token_ids", "segments", "importance", "weights", "advantage"))
        assert sum(row["weights"]) == pytest.approx(length, rel=1e-4)
        assert row["status"] == "scored"
        assert "####" in "".join(row["tokens"])


def test_scores_of_the_run_are_those_of_the_front_door(three_steps, folder):
    """The same responses, on the weights on disk: importance, segments and weights."""
    model = world.load_model(folder / "model", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = dumped(folder)
    credit = oar_plugin.importance(
        model,
        prompts=[row["prompt_ids"] for row in rows],
        responses=[row["token_ids"] for row in rows],
        tokenizer=tokenizer,
        **OWN,
    )
    for place, row in enumerate(rows):
        here = slice(len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["token_ids"]))
        want = torch.tensor(row["importance"])
        # 1e-3: the model is sure of its answers, and onehot - p of a sure prediction keeps few of float32's digits.
        assert (credit.importance[place, here] - want).abs().max() < 1e-3 * want.max()
        assert credit.segments[place, here].tolist() == row["segments"]
        torch.testing.assert_close(credit.weights[place, here], torch.tensor(row["weights"]))


def test_asynchronous_with_kl_in_reward_correction_and_offload(folder):
    """The recipe (packed, dynamic batches, checkpointing) with RLOO, a reference model, rollout correction, and OAR-P on the
    rollout engines, whose copies are aborted at each exchange of weights and run again with the new ones."""
    steps = smoke(
        "qwen2_5_7b_colocate_async",
        folder,
        "algorithm.use_kl_in_reward=True",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.oar.base_estimator=rloo",
        "algorithm.oar.importance=oar_p",
        "algorithm.oar.perturbation.backend=rollout",
    )
    check(steps, [1, 2])
    assert all(step["oar/scored"] > 0.9 for step in steps), "with KL in the reward no advantage is known to be zero"
    assert all(step["oar/offload/scored"] > 0.5 for step in steps)


def test_lora_in_bypass_mode_as_published(folder):
    """Old log-probs are the rollout's, so importance has passes of its own."""
    if not loads_adapters():
        pytest.skip("this verl loads no adapter into this vLLM")
    steps = smoke(
        "qwen2_5_7b_lora",
        folder,
        "algorithm.rollout_correction.bypass_mode=True",
        "algorithm.oar.base_estimator=reinforce_plus_plus_baseline",
        "oar=published",
        "algorithm.oar.warmup_steps=1",
    )
    check(steps, [1, 2])
