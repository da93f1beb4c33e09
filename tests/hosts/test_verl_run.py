"""Real verl, real Ray, real vLLM on a CPU, with OAR. Minutes, not seconds."""

import math

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("vllm")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

import oar_plugin
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import gate_of
from recipes.smoke import VOCABULARY
from tests.hosts.engine import world
from tests.hosts.whole_run import RECIPES, check, dumped, loads_adapters, prompt_ids, smoke, whole_run

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
        patch.setenv("TENSORBOARD_DIR", str(folder / "board"))
        return smoke(
            "qwen2_5_7b_math",
            folder,
            "trainer.total_training_steps=3",
            "trainer.test_freq=3",
            f"algorithm.oar.importance={OWN['importance']}",
            f"algorithm.oar.gate={OWN['gate']}",
            f"algorithm.oar.dump.dir={folder}/dump",
            "algorithm.oar.dump.every=2",
            "trainer.logger=[console,file,tensorboard]",
        )


def test_three_steps_of_the_standard_recipe(three_steps):
    check(three_steps, [1, 2, 3])
    for step in three_steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the actor's weights"
    assert any(name.startswith("val-core/") for name in three_steps[-1]), "validated as the recipe would"


def looked_at(step):
    """The number of the step's 32 responses with an advantage: they were scored or fell back."""
    rows = step["oar/scored"] * 32 / (1 - step["oar/fallback/any"])
    assert rows == pytest.approx(round(rows), abs=1e-3)
    return round(rows)


def test_only_rows_with_an_advantage_are_scored(three_steps):
    """Eight groups of four rows: either all rows of a group have an advantage or none."""
    for step in three_steps:
        assert looked_at(step) % 4 == 0
    assert min(step["oar/scored"] for step in three_steps) < 1


def test_whole_groups_are_dumped_with_all_that_is_known_of_them(three_steps, folder):
    """At the requested steps; dumped weights are the gate's weights of the dumped importance."""
    assert sorted(path.name for path in (folder / "dump").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    everyone = dumped(folder, scored_only=False)
    groups = [[row for row in everyone if row.group == group] for group in dict.fromkeys(row.group for row in everyone)]
    assert len(groups) == min(2, looked_at(three_steps[0]) // 4), "two, where as many have right and wrong responses"
    for group in groups:
        assert len(group) == 4
        assert {row.right for row in group} == {True, False}
        assert len({row.prompt for row in group}) == len({row.truth for row in group}) == 1
    for row in dumped(folder):
        assert "####" in "".join(row.tokens)
        assert all(value < 0 for value in row.log_probs)
        assert all(0 <= value < math.log(VOCABULARY) for value in row.entropies)
        gate = gate_of(OWN["gate"])
        importance, segments = torch.tensor([row.importance["saliency"]]), torch.tensor([row.segments])
        weights = gate.weights(importance, segments == Segment.REASONING, gate.tau, 2.0, 0.1)
        torch.testing.assert_close(weights[0], torch.tensor(row.weights), rtol=0, atol=1e-6)
    for step in three_steps:
        assert step["oar/dump_failed"] == step["oar/dashboard_failed"] == 0
        assert ("timing_s/oar_dump" in step) == (step["step"] < 3)


def test_tensorboard_has_histograms_and_responses_beside_verls_scalars(three_steps, folder):
    board = EventAccumulator(str(folder / "board"), {"histograms": 0, "tensors": 0}).Reload()
    assert [event.step for event in board.Histograms("oar/weights")] == [1, 2]
    assert [event.step for event in board.Tensors("oar/responses/text_summary")] == [1, 2]
    counted = board.Histograms("oar/weights")[0].histogram_value
    assert counted.sum / counted.num == pytest.approx(1, abs=1e-3), "weights average 1"
    assert {"oar/ess_ratio", "actor/grad_norm", "oar/dump_failed"} <= set(board.Tags()["scalars"])


def test_scores_of_the_run_are_those_of_the_front_door(three_steps, folder):
    """Importance, segments and weights of the same responses, with the weights on disk."""
    model = world.load_model(folder / "model", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = dumped(folder)
    prompts = [prompt_ids(folder, row) for row in rows]
    responses = [row.token_ids for row in rows]
    credit = oar_plugin.importance(model, prompts=prompts, responses=responses, tokenizer=tokenizer, **OWN)
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        here = slice(len(prompt), len(prompt) + len(row.token_ids))
        want = torch.tensor(row.importance["saliency"])
        # 1e-3: the model is sure of its answers, and onehot - p of a sure prediction keeps few of float32's digits.
        assert (credit.importance[place, here] - want).abs().max() < 1e-3 * want.max()
        assert credit.segments[place, here].tolist() == row.segments
        torch.testing.assert_close(credit.weights[place, here], torch.tensor(row.weights))


def test_asynchronous_with_kl_in_reward_correction_and_offload(folder):
    """The recipe (packed, dynamic batches, checkpointing) with RLOO, a reference model, rollout correction, and OAR-P on the
    rollout engines. Each exchange of weights aborts their masked copies, which run again with the new weights."""
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
    """The rollout's log-probs are the old ones, so importance has passes of its own."""
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
