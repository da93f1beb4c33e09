"""Real verl, real Ray, real vLLM on a CPU, with OAR. Minutes, not seconds."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

pytest.importorskip("verl")
pytest.importorskip("vllm")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

import oar_plugin
from benchmarks.tiny.verl_run import read_metrics
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import gate_of
from oar_plugin.runs.recipe import command
from recipes.smoke import VOCABULARY
from tests.hosts import tools
from tests.hosts.engine import world
from tests.hosts.whole_run import ADAPTER, LIMIT_S, RECIPES, check, dumped, loads_adapters, prompt_ids, smoke
from verl_cpu.launch import cpu_environment
from verl_cpu.session import session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]  # the launched run starts twice

RECIPE = "qwen2_5_7b_math"
OWN = {
    "importance": "python:tests.own_importance:Saliency",
    "gate": "python:tests.own_importance:upper_half",
    "answer_patterns": ["boxed", "hash"],
}
OVERRIDES = [
    "+cpu_smoke=dp",
    "trainer.save_freq=1",
    "trainer.test_freq=3",
    "trainer.logger=[console,file,tensorboard]",
    f"algorithm.oar.importance={OWN['importance']}",
    f"algorithm.oar.gate={OWN['gate']}",
    "algorithm.oar.dump.dir=dump",
    "algorithm.oar.dump.every=2",
]
NAME = f"{RECIPE}-oar-s2"


class Call(NamedTuple):
    status: int
    said: str
    steps: list[list[int]]  # of each start so far, as its file of metrics has them


class Launched(NamedTuple):
    home: Path  # where `oar launch` is called, with model and data
    folder: Path  # the run's
    calls: dict[str, Call]

    def files(self) -> list[Path]:
        """The files of metrics, one of each start, the oldest first."""
        return sorted((self.folder / "metrics").glob("*"), key=lambda file: file.stat().st_mtime)

    def call(self, name: str, words: list[str], environment: dict[str, str]) -> None:
        done = subprocess.run(words, cwd=self.home, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        steps = [[step["step"] for step in read_metrics(file)] for file in self.files()]
        self.calls[name] = Call(done.returncode, done.stdout + done.stderr, steps)


@pytest.fixture(scope="module")
def launched(assets, tmp_path_factory):
    """The standard recipe as `oar launch` starts it, with an importance and a gate of one's own: two steps, refused with other
    settings, and resumed for a third step."""
    home = tmp_path_factory.mktemp("launched")
    shutil.copytree(assets, home, dirs_exist_ok=True)
    made = Launched(home, home / "made" / "oar" / NAME, {})
    with session() as opened:
        places = {"OAR_SMOKE": str(home), "OAR_CHECKPOINTS": str(home / "made"), "PYTHONPATH": str(RECIPES.parent)}
        # COLUMNS: what else runs in this process may have set a narrow one.
        environment = {**os.environ, **cpu_environment(), **opened.environment(), **places, "COLUMNS": "200"}

        def launch(name, *words):
            words = ["launch", RECIPE, "--seed", "2", *OVERRIDES, *words]
            made.call(name, [sys.executable, "-m", "oar_plugin.cli.main", *words], environment)

        launch("first", "trainer.total_training_steps=2")
        # The driver itself refuses: a login node may not see the folder.
        other = [f"trainer.experiment_name={NAME}", "trainer.total_training_steps=2", "data.seed=3"]
        words = command(RECIPES / RECIPE, "oar", [*OVERRIDES, *other])
        made.call("other seed", [sys.executable, *words[1:]], environment)
        launch("resumed", "trainer.total_training_steps=3", "--resume")
    return made


def test_a_run_is_kept_apart_refused_and_resumed(launched):
    folder, calls = launched.folder, launched.calls
    statuses = {name: call.status for name, call in calls.items()}
    wanted = {"first": 0, "other seed": 2, "resumed": 0}
    assert statuses == wanted, [calls[name].said[-4000:] for name in wanted if statuses[name] != wanted[name]]
    assert calls["first"].steps == calls["other seed"].steps == [[1, 2]]
    assert f"{folder} holds a run with other settings" in calls["other seed"].said
    assert "  data.seed: 2 there, 3 now" in calls["other seed"].said
    assert calls["resumed"].steps == [[1, 2], [3]]

    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (folder / "dump" / "step_000001.jsonl").exists()
    assert yaml.safe_load((folder / "run.yaml").read_text())["state"] == "finished"
    assert {path.name for path in launched.home.iterdir()} == {"model", "data.parquet", "made"}, "nothing is elsewhere"


@pytest.fixture(scope="module")
def three_steps(launched):
    return [step for file in launched.files() for step in read_metrics(file)]


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


def test_whole_groups_are_dumped_with_all_that_is_known_of_them(three_steps, launched):
    """At the requested steps; dumped weights are the gate's weights of the dumped importance."""
    folder = launched.folder
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


def test_tensorboard_has_responses_beside_verls_scalars(launched):
    board = EventAccumulator(str(launched.folder / "tensorboard"), {"tensors": 0}).Reload()
    assert [event.step for event in board.Tensors("oar/responses/text_summary")] == [1, 2]
    assert {"oar/ess_ratio", "actor/grad_norm", "oar/dump_failed"} <= set(board.Tags()["scalars"])


def test_scores_of_the_run_are_those_of_the_front_door(launched):
    """Importance, segments and weights of the same responses, with the weights on disk."""
    model = world.load_model(launched.home / "model", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(launched.home / "model")
    rows = dumped(launched.folder)
    prompts = [prompt_ids(launched.home, row) for row in rows]
    responses = [row.token_ids for row in rows]
    credit = oar_plugin.importance(model, prompts=prompts, responses=responses, tokenizer=tokenizer, **OWN)
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        here = slice(len(prompt), len(prompt) + len(row.token_ids))
        want = torch.tensor(row.importance["saliency"])
        # 1e-3: the model is sure of its answers, and onehot - p of a sure prediction keeps few of float32's digits.
        assert (credit.importance[place, here] - want).abs().max() < 1e-3 * want.max()
        assert credit.segments[place, here].tolist() == row.segments
        torch.testing.assert_close(credit.weights[place, here], torch.tensor(row.weights))


@pytest.mark.nightly
def test_asynchronous_in_bypass_mode_with_lora_as_published(assets, tmp_path):
    """The rollout's log-probs are the old ones, so importance has passes of its own."""
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    steps = smoke(
        "qwen2_5_7b_colocate_async",
        tmp_path,
        *(ADAPTER if loads_adapters() else []),
        "algorithm.rollout_correction.bypass_mode=True",
        "algorithm.oar.base_estimator=reinforce_plus_plus_baseline",
        "oar=published",
        "algorithm.oar.warmup_steps=1",
    )
    check(steps, [1, 2])


@pytest.mark.nightly
def test_what_a_tool_says_has_no_credit(assets, tmp_path):
    """Two turns with a tool's text between them: credit goes to the model's own tokens before the answer of the last turn."""
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    turns = "actor_rollout_ref.rollout.multi_turn"
    steps = smoke(
        RECIPE,
        tmp_path,
        "algorithm.oar.importance=fisher",  # two steps are too few to predict
        f"{turns}.enable=True",
        f"{turns}.function_tool_path={tools.__file__}",
        f"{turns}.format=always",
        f"{turns}.max_user_turns=1",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.max_model_len=96",
        "data.max_response_length=64",
        f"algorithm.oar.dump.dir={tmp_path}/dump",
        "algorithm.oar.dump.every=1",
    )
    check(steps, [1, 2])
    said, before_last_answer = tools.HINT.split(), 0
    for row in dumped(tmp_path, 1) + dumped(tmp_path, 2):
        start = row.mask.index(0)
        end = start + len(said)
        assert [token.strip() for token in row.tokens[start:end]] == said
        assert {place for place, own in enumerate(row.mask) if not own} == {*range(start, end)}
        assert {row.segments[place] for place in range(start, end)} == {Segment.OUTSIDE}
        assert row.weights[start:end] == [1.0] * len(said)
        before_last_answer += Segment.REASONING in row.segments[end:]
    assert before_last_answer, "some second turns have an answer of their own, and reasoning before it"
