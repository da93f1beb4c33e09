"""What a user gives: settings, files of estimators, a model and its responses; and what is said where they cannot be used."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.__main__ import main
from benchmarks.fidelity import Settings
from benchmarks.fidelity.estimators import loaded_estimators
from benchmarks.fidelity.sources import file_source
from benchmarks.tiny.words import make_tokenizer

GOOD = {"prompt": "What is 3 + 4?", "response": "We add 3 and 4, which gives 7. So \\boxed{7}.", "correct": True}
TOKENIZER = make_tokenizer(400, by_bytes=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes, max_position_embeddings=128)).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def read(folder, tmp_path):
    def read(*lines, limit=0):
        file = tmp_path / "mine.jsonl"
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return file_source(folder, file, ("boxed",), limit)

    return read


def test_text_and_ids_say_the_same(read):
    ids = {f"{name}_ids": TOKENIZER.encode(GOOD[name], add_special_tokens=False) for name in ("prompt", "response")}
    first, second = read(GOOD, "", ids).responses
    assert torch.equal(first.token_T, second.token_T)
    assert (first.correct, second.correct, first.causal) == (True, None, None)
    assert first.prompt_text + "".join(first.texts) == GOOD["prompt"] + GOOD["response"]
    assert "".join(first.texts[slice(*(at - len(first.prompt) for at in first.answer))]) == "7"


def test_responses_without_an_answer_are_counted_and_lines_limited(read):
    source = read({"prompt": "x", "response": "I do not know."}, GOOD, {"prompt": "x", "response": "\\boxed{7}"})
    assert (len(source.responses), source.unusable) == (1, 2)
    assert len(read(GOOD, GOOD, "not read", limit=2).responses) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2, Invalid JSON"),
        ([1], "line 2, Input should be an object"),
        ({"prompt": "x"}, "line 2, field 'response_ids': Field required.*a line is an object with prompt and response"),
        ({"prompt": 3, "response": "x"}, "line 2, field 'prompt': .*a valid string, got 3"),
        (
            {"prompt_ids": ["a"], "response": "x"},
            "line 2, field 'prompt_ids': Input should be a valid integer.* got 'a'",
        ),
        ({"prompt": "x", "response_ids": [99999]}, "line 2, .*'response_ids': 99999 is not in the vocabulary of 400"),
        ({**GOOD, "correct": "yes"}, "line 2, field 'correct': Input should be a valid boolean, got 'yes'"),
        ({"prompt": "x", "response_ids": [5] * 130}, "line 2, field 'response': 131 tokens .* the model allows 128"),
    ],
)
def test_a_bad_line_is_named(read, line, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(GOOD, line)


def test_nothing_to_score_is_an_error_that_says_why(read, folder, tmp_path):
    with pytest.raises(ValueError, match="none of 1 responses has reasoning and an answer written as boxed"):
        read({"prompt": "x", "response": "no"})
    with pytest.raises(ValueError, match="cannot be read"):
        file_source(folder, tmp_path / "missing", ("boxed",), 0)
    with pytest.raises(ValueError, match=r"has no config.json"):
        file_source(tmp_path, tmp_path / "missing", ("boxed",), 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "needs a dictionary ESTIMATORS"),
        ("import nowhere_to_be_found", "cannot be imported"),
        ("ESTIMATORS = {'fisher 1': print}", "is taken"),
        (None, "not a Python file"),
    ],
)
def test_a_file_of_estimators_that_cannot_be_used_is_refused(tmp_path, text, complaint):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        loaded_estimators([file])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seeds": 0}, "--seeds 0"),
        ({"responses": 1}, "--responses 1"),
        ({"responses_file": Path("x")}, "belong together"),
        ({"dtypes": ()}, "--dtypes"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(Settings(), **change).check()


def test_the_command_runs_on_a_model_from_disk(folder, tmp_path, capsys):
    file, out = tmp_path / "mine.jsonl", tmp_path / "out"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, 'correct': False})}\n")
    words = ["--model", str(folder), "--responses-file", str(file), "--rounds", "1", "--curves", "1", "--device", "cpu"]
    assert main(["fidelity", *words, "--dtypes", "float32", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        f"fidelity_cpu.{ending}" for ending in ("md", "json", "html", "png")
    }
    assert "exact OAR-P" in capsys.readouterr().out
    assert main(["fidelity", "--model", str(folder)]) == 2
    assert "belong together" in capsys.readouterr().err
    assert main(["fidelity", "--tasks", "nothing"]) == 2
    assert "--tasks nothing: allowed: parallel" in capsys.readouterr().err
