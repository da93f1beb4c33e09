"""Problems, and how vLLM is asked. A stub stands in for it: it answers with the seed, refuses, sleeps or dies."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oar_plugin.runs.evaluate import responses
from oar_plugin.runs.evaluate.checkpoints import EvaluationError
from oar_plugin.runs.evaluate.responses import ProblemSet, read_problems, responses_of

CASES = json.loads((Path(__file__).parents[1] / "rows.json").read_text("utf-8"))
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 8, "seed": 0}
STUB = """
import json, os, subprocess, sys, time
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
with open(given["--output-file"], "w") as file:
    for line in open(given["--input-file"]):
        body = json.loads(line)["body"]
        text = body["messages"][0]["content"]
        if text == "DIE":
            os._exit(3)
        if text == "SLEEP":
            engine = subprocess.Popen(["sleep", "600"])
            print(engine.pid, flush=True, file=sys.stderr)
            engine.wait()
        response = {"body": {"choices": [{"message": {"content": f"{text} {body['seed']}"}}]}}
        row = {"error": None, "response": response} if text != "LONG" else {"error": "too long", "response": {"body": None}}
        file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    folder = tmp_path / "stub" / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents[:2]):
        (parent / "__init__.py").touch()
    (folder / "run_batch.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stub"), *sys.path]))


def problem_set(*truths, name="ours"):
    return ProblemSet(name, [([{"role": "user", "content": truth}], truth) for truth in truths])


def made(folder, *truths, k=2):
    return responses_of("org/model", problem_set(*truths), SAMPLING, k, 1, folder)


def test_seeds_depend_neither_on_the_number_nor_on_the_order_of_requests(stub, tmp_path):
    first, more = made(tmp_path, "1", "2"), made(tmp_path, "1", "2", k=4)
    assert [row[:2] for row in more] == first
    assert made(tmp_path, "2", "1", k=4) == more[::-1]
    assert len({text for row in more for text in row}) == 8, "a seed of its own for each"
    assert [{text[0] for text in row} for row in more] == [{"1"}, {"2"}]


@pytest.mark.parametrize(("truth", "said"), [("DIE", "0 responses to 4"), ("LONG", "too long")])
def test_a_set_that_is_not_whole_is_told_and_not_kept(truth, said, stub, tmp_path):
    with pytest.raises(EvaluationError, match=said):
        made(tmp_path / "responses", "1", truth)
    assert not list(tmp_path.glob("responses/*"))


@pytest.mark.parametrize("harm", [lambda t: t[:-9], lambda t: t.split("\n")[0], lambda t: t * 2, lambda _: "[]\n" * 4])
def test_a_damaged_file_is_refused_and_left_alone(harm, stub, tmp_path):
    made(tmp_path / "responses", "1", "2")
    (file,) = (tmp_path / "responses").iterdir()
    file.write_text(damaged := harm(file.read_text()))
    with pytest.raises(EvaluationError, match="is damaged; delete it"):
        made(tmp_path / "responses", "1", "2")
    assert file.read_text() == damaged


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_vllm_and_its_engines_end_when_the_command_ends(sent, stub, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(f"""
import signal
from pathlib import Path
from tests.runs.evaluate.test_responses import made
signal.signal(signal.SIGINT, signal.default_int_handler)
made(Path({str(tmp_path)!r}), "SLEEP")
""")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[3])])
    parent = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    engine = int(parent.stderr.readline())
    parent.send_signal(sent)
    try:
        parent.communicate(timeout=60)  # all of them have the same stderr: its end comes when all are gone
    except subprocess.TimeoutExpired:
        os.kill(engine, signal.SIGKILL)
        raise


@pytest.mark.parametrize("gpus", [0, 4])
def test_all_gpus_are_used(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(responses, "_UNTIL_STDIN_CLOSES", f'echo "$@" > {tmp_path}/said')
    assert responses._answers("org/model", [], 2) == b""
    said = (tmp_path / "said").read_text()
    assert ("--tensor-parallel-size=2 --data-parallel-size=2" in said) == (gpus == 4)
    assert ("--enforce-eager" in said) == (gpus == 0)


def test_repeated_problems_are_asked_once(tmp_path, monkeypatch):
    both = problem_set("1", "2", name="aime24")
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": truth}} for prompt, truth in both.problems]
    (tmp_path / "aime24").mkdir()
    pq.write_table(pa.Table.from_pylist(rows * 8), tmp_path / "aime24" / "test.parquet")
    assert read_problems("aime24", tmp_path, None) == both
    assert read_problems("aime24", tmp_path, 1).problems == both.problems[:1]
    monkeypatch.chdir(tmp_path / "aime24")
    assert read_problems("test.parquet", tmp_path, None).name == "aime24"


def written(path, *rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["mine.parquet", "mine.jsonl"])
@pytest.mark.parametrize(("row", "asked", "truth"), CASES["evaluation"])
def test_a_row_is_asked_as_it_is_meant_or_refused_with_its_place(row, asked, truth, name, tmp_path):
    path = written(tmp_path / name, row)
    if isinstance(asked, str):
        with pytest.raises(EvaluationError, match=re.escape(asked)) as error:
            read_problems(path, tmp_path, None)
        assert f"{path}, {'row' if name.endswith('parquet') else 'line'} 1: " in str(error.value)
    else:
        prompt = [{"role": role, "content": content} for role, content in asked]
        assert read_problems(path, tmp_path, None) == ProblemSet("mine", [(prompt, truth)])


def test_equal_prompts_have_one_answer(tmp_path):
    rows = [{"prompt": "A", "reward_model": {"ground_truth": truth}} for truth in ("5", "5 ", "6")]
    assert len(read_problems(written(tmp_path / "test.jsonl", *rows[:2]), tmp_path, None).problems) == 1
    with pytest.raises(EvaluationError, match="row 3: '6', where an equal prompt has '5'"):
        read_problems(written(tmp_path / "test.jsonl", *rows), tmp_path, None)


@pytest.mark.parametrize("name", ["mathh500", "deepmath", "a.csv"])
def test_only_what_oar_data_makes_is_said_to_be_made_by_it(name, tmp_path):
    with pytest.raises(EvaluationError, match="see oar eval --help"):
        read_problems(name, tmp_path, None)
