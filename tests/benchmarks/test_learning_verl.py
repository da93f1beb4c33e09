"""The study through verl: what it hands over, and one real run of a step."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from benchmarks.__main__ import main
from benchmarks.learning import verl
from benchmarks.learning.training import Run
from benchmarks.tiny.model import build_model
from tests.hosts.whole_run import LIMIT_S

RUN = Run(task="chain", method="onward", lr=6e-4, seed=3, steps=2, prompts=4, copies=2, tau=0.85, gate="two_level")


def test_verl_is_told_what_the_small_trainer_does(tmp_path):
    assert {
        "algorithm.adv_estimator=oar",
        "algorithm.oar.importance=onward",
        "algorithm.oar.gate=two_level",
        "algorithm.oar.tau=0.85",
        "actor_rollout_ref.actor.optim.lr=0.0006",
        "actor_rollout_ref.rollout.n=2",
        "data.train_batch_size=4",
    } <= set(verl.overrides(RUN, tmp_path))
    plain = verl.overrides(replace(RUN, method="grpo"), tmp_path)
    assert not [override for override in plain if "algorithm.oar" in override]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_a_real_run(tmp_path, monkeypatch):
    """One step of real verl, Ray and vLLM. The model is a random one, so no reward differs and nothing is scored: what
    importance does there is seen in tests/recipes."""
    monkeypatch.setattr(verl, "learned_model", lambda *_: build_model(0, heads=2))
    monkeypatch.setattr(verl, "HELD_OUT", 4)
    small = "--tasks chain --methods onward --seeds 1 --steps 1 --prompts 4 --copies 2 --gate two_level"
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(["learning", "--through-verl", *small.split(), *folders]) == 0
    (file,) = (tmp_path / "runs" / "verl").glob("*.json")
    record = json.loads(file.read_text())
    assert [sorted(record["held_out"]), len(record["steps"])] == [["0", "1"], 1]
    step = record["steps"][0]
    assert step["sample_seconds"] > 0 < step["update_seconds"]
    assert step["length"] > 1
    assert "Real verl, Ray and vLLM on a CPU" in (tmp_path / "learning_verl.md").read_text()
