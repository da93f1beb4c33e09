"""Engines and what they are asked. A stub stands in for vLLM: it answers with the prompt, sleeps or dies, as that says."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from oar_plugin.runs.evaluate import EvaluationError
from oar_plugin.runs.evaluate import generate as engines
from oar_plugin.runs.evaluate.generate import ResponseFile, generate
from tests.runs.evaluate import SAMPLING, problem_set

DIE, SLEEP = 666, 777
STUB = {
    "vllm/__init__.py": f"""
import os, time
from types import SimpleNamespace as EngineArgs, SimpleNamespace as SamplingParams
class LLMEngine:
    def from_engine_args(arguments, usage_context):
        engine = LLMEngine()
        engine.requests = []
        return engine
    def add_request(self, *request):
        self.requests.append(request)
    def has_unfinished_requests(self):
        return bool(self.requests)
    def step(self):
        key, (token,), parameters = self.requests.pop(0)
        if token == {DIE}:
            os._exit(3)
        if token == {SLEEP}:
            time.sleep(600)
        text = f"{{token}} {{parameters.seed}}"
        return [EngineArgs(request_id=key, outputs=[EngineArgs(text=text, finish_reason="length" if token % 2 else "stop")])]
""",
    "vllm/inputs.py": "def TokensPrompt(prompt_token_ids):\n    return prompt_token_ids\n",
    "vllm/sampling_params.py": "class RequestOutputKind:\n    FINAL_ONLY = 0\n",
    "vllm/usage/__init__.py": "",
    "vllm/usage/usage_lib.py": "class UsageContext:\n    LLM_CLASS = 0\n",
}


@pytest.fixture
def stub(tmp_path, monkeypatch):
    for name, text in STUB.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)  # engines are spawned with this path


def answered(engine_count, requests):
    return engines._answered("org/model", SAMPLING, 16, [""] * engine_count, requests)


def engines_left():
    """Ours have no name of their own; the reward's processes, and those of other tests, stay."""
    return [process for process in multiprocessing.active_children() if process.name.startswith("SpawnProcess-")]


def test_two_engines_answer_every_request_of_every_set_once(stub):
    made = answered(2, [(number, [number // 2], 7) for number in range(12)])
    assert sorted(made) == [(number, f"{number // 2} 7", number // 2 % 2 == 1) for number in range(12)]
    assert not engines_left()


def test_an_engine_that_dies_ends_the_others_and_is_told(stub):
    with pytest.raises(EvaluationError, match="ended with status 3"):
        list(answered(2, [(0, [SLEEP], 0), (1, [DIE], 0)]))
    assert not engines_left()


def test_an_engine_ends_when_its_parent_is_killed(stub, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text("""
import multiprocessing
from tests.runs.evaluate.test_generate import SLEEP, answered
if __name__ == "__main__":
    for _ in answered(1, [(0, [1], 0), (1, [SLEEP], 0)]):
        print(multiprocessing.active_children()[0].pid, flush=True)
""")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    environment = {**os.environ, "PYTHONPATH": path}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True)
    engine = int(parent.stdout.readline())
    parent.kill()
    try:
        parent.communicate(timeout=60)  # the engine has the same stdout: its end comes when both are gone
    except subprocess.TimeoutExpired:
        os.kill(engine, signal.SIGKILL)
        raise


@pytest.mark.parametrize(
    ("count", "visible", "tensor_parallel", "groups"),
    [
        (0, None, 1, [""]),
        (2, None, 1, ["0", "1"]),
        (4, "4,5,6,7", 2, ["4,5", "6,7"]),
        (3, "U-a,U-b,U-c", 2, ["U-a,U-b"]),
    ],
)
def test_gpus_are_dealt_out_to_engines(count, visible, tensor_parallel, groups, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert engines._gpu_groups(tensor_parallel) == groups
    if count:
        with pytest.raises(EvaluationError, match=f"at most {count}"):
            engines._gpu_groups(count + 1)


def test_more_samples_add_to_what_there_is_and_seeds_depend_on_neither_number_nor_order(tmp_path, monkeypatch):
    asked = []

    def answered(model, sampling, context, groups, requests):
        asked.append(len(requests))
        for number, (truth,), seed in requests:
            yield number, f"{truth} {seed}", False

    progress = []

    def made(folder, sets, samples):
        """(problem, sample) -> text."""
        file = ResponseFile(tmp_path / folder, "org/model", SAMPLING, sets)
        generate("org/model", [sets], [file], SAMPLING, samples, 1, lambda *pair: progress.append(pair), print)
        return {(sets.problems[p].ground_truth, sample): r.text for (p, sample), r in file.responses.items()}

    def prompts(model, sets, *_):
        return [[[problem.ground_truth] for problem in each.problems] for each in sets], 8

    monkeypatch.setattr(engines, "_answered", answered)
    monkeypatch.setattr(engines, "_prompts", prompts)
    first, more = made("a", problem_set("1", "2"), 2), made("a", problem_set("1", "2"), 4)
    assert first.items() < more.items()
    assert made("b", problem_set("2", "1"), 4) == more
    assert len({*more.values()}) == 8, "a seed of its own for each"
    assert all(text.startswith(problem) for (problem, _), text in more.items())
    monkeypatch.setattr(engines, "_prompts", None)
    progress.clear()
    assert made("a", problem_set("1", "2"), 4) == more, "no model is loaded where all responses are there"
    assert asked == [4, 4, 8]
    assert progress == [(8, 8)]


@pytest.fixture
def tokenizer(monkeypatch):
    """A word is a token; of a context of 6."""
    made = SimpleNamespace(apply_chat_template=lambda messages, **_: messages[0]["content"].split())
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda model, *, trust_remote_code: made)
    config = SimpleNamespace(max_position_embeddings=6)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda model, *, trust_remote_code: config)
    return made


def test_a_prompt_leaves_room_for_a_response_or_is_named(tokenizer):
    def context(*truths, max_tokens=8):
        said = []
        return engines._prompts("org/model", [problem_set(*truths)], max_tokens, said.append)[1], said

    assert context("1", "2 3", max_tokens=3) == (6, [])
    assert context("1", max_tokens=3) == (5, [])
    room, said = context("1", "2 3")
    assert (room, len(said)) == (6, 1)
    assert [part for part in ("context of 6", "leaves 3", "max_tokens is 8") if part not in said[0]] == []
    with pytest.raises(EvaluationError, match=r"problem 2 of ours has 6 tokens.*\(6\)"):
        context("1", "2 3 4 5 6")


@pytest.mark.parametrize("error", [jinja2.TemplateError("no system role"), TypeError("not a list"), ValueError()])
def test_a_chat_template_that_fails_is_told(error, tokenizer, monkeypatch):
    def fail(messages, **_):
        raise error

    tokenizer.apply_chat_template = fail
    with pytest.raises(EvaluationError, match=str(error) or "ValueError"):
        engines._prompts("org/model", [problem_set("1")], 8, print)
