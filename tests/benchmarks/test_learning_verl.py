"""The learning bench through verl: what it hands over, and one real run of a step."""

import json
import random
from dataclasses import replace

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from benchmarks.learning import verl as learning_verl
from benchmarks.learning.measure import Run
from benchmarks.tiny.model import build_model
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.words import EOS, PAD, pieces, text
from oar_plugin.cli.main import main
from oar_plugin.passes.tokens import TokenBytes
from tests.hosts.whole_run import LIMIT_S

RUN = Run("chain", "onward", 6e-4, 3, steps=2, prompts=4, copies=2, tau=0.85, gate="two_level")


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_tokenizer_writes_the_tasks_own_tokens(task):
    tokenizer, rng = learning_verl.make_tokenizer(), random.Random(0)
    problem = task.problem(rng)
    response = task.demonstration(problem, rng, 0.5)
    assert tokenizer(text(problem.prompt))["input_ids"] == list(problem.prompt)
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": text(problem.prompt)}], add_generation_prompt=True
    )
    assert shown["input_ids"] == list(problem.prompt)
    assert TokenBytes(tokenizer).pieces(response) == pieces(response)
    assert tokenizer.decode(response, skip_special_tokens=True).split() == text(response).split()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)


def test_the_reward_is_the_tasks_own():
    from recipes.cpu_demo.reward import compute_score

    task, rng = TASKS["chain"], random.Random(0)
    tokenizer = learning_verl.make_tokenizer()
    seen = set()
    for problem in (task.problem(rng) for _ in range(20)):
        response = task.demonstration(problem, rng, 0.3)
        said = compute_score("", tokenizer.decode(response, skip_special_tokens=True), text(problem.answer))["score"]
        assert said == task.read(problem, response).right
        seen.add(said)
    assert seen == {0.0, 1.0}


def test_verl_is_told_what_the_small_trainer_does(tmp_path):
    told = learning_verl.overrides(RUN, tmp_path)
    assert {
        "algorithm.adv_estimator=oar",
        "algorithm.oar.importance=onward",
        "algorithm.oar.gate=two_level",
        "algorithm.oar.tau=0.85",
        "actor_rollout_ref.actor.optim.lr=0.0006",
        "actor_rollout_ref.rollout.n=2",
        "data.train_batch_size=4",
    } <= set(told)
    plain = learning_verl.overrides(replace(RUN, method="grpo"), tmp_path)
    assert not [override for override in plain if "algorithm.oar" in override]


@pytest.mark.parametrize("change", [{"method": "oracle"}, {"positive_only": True}])
def test_what_verl_does_not_have_is_refused(change):
    with pytest.raises(ValueError, match="--through-verl"):
        learning_verl.check(replace(RUN, **change))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_a_real_run(tmp_path, monkeypatch):
    """One step of real verl, Ray and vLLM. The model is a random one, so no reward differs and nothing is scored: what
    importance does there is seen in tests/recipes."""
    monkeypatch.setattr(learning_verl, "learned_model", lambda *_: build_model(0, heads=2))
    monkeypatch.setattr(learning_verl, "HELD_OUT", 4)
    small = [
        "--tasks",
        "chain",
        "--methods",
        "onward",
        "--seeds",
        "1",
        "--steps",
        "1",
        "--prompts",
        "4",
        "--copies",
        "2",
    ]
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(["bench", "learning", "--through-verl", *small, "--gate", "two_level", *folders]) == 0
    (file,) = (tmp_path / "runs" / "verl").glob("*.json")
    record = json.loads(file.read_text())
    assert [sorted(record["held_out"]), len(record["steps"])] == [["0", "1"], 1]
    step = record["steps"][0]
    assert step["sample_seconds"] > 0 < step["update_seconds"]
    assert step["length"] > 1
    assert "Real verl, Ray and vLLM on a CPU" in (tmp_path / "learning_verl.md").read_text()
