"""Responses from a file: what is read, and what is said about a line that cannot be."""

import dataclasses
import json

import pytest
import torch

from benchmarks.fidelity.measure import Settings
from benchmarks.fidelity.sources import BadResponses, file_source
from benchmarks.tiny.random_models import build_tokenizer
from oar_plugin.cli.main import main
from oar_plugin.credit.answer import Segment
from tests.bench.fidelity_model import tiny_model

GOOD = {"prompt": "What is 3 + 4?", "response": "We add 3 and 4, which gives 7. So \\boxed{7}.", "correct": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    small = tiny_model().config
    config = LlamaConfig(**{**small.to_dict(), "vocab_size": len(tokenizer), "max_position_embeddings": 64})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def settings(folder, tmp_path, *lines: object) -> Settings:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return Settings(model=folder, responses_file=file, responses=0, device="cpu")


def test_text_and_ids_say_the_same(folder, tmp_path):
    tokenizer = build_tokenizer()
    ids = {f"{name}_ids": tokenizer.encode(GOOD[name], add_special_tokens=False) for name in ("prompt", "response")}
    source = file_source(settings(folder, tmp_path, GOOD, "", ids))
    first, second = source.responses
    assert torch.equal(first.token_T, second.token_T)
    assert first.correct is True
    assert second.correct is None
    assert first.causal_T is None
    assert "".join(first.texts) == GOOD["prompt"] + GOOD["response"]
    answer = [text for text, segment in zip(first.texts, first.segments_T, strict=True) if segment == Segment.ANSWER]
    assert "7" in "".join(answer)


def test_responses_without_an_answer_are_counted(folder, tmp_path):
    without = {"prompt": "x", "response": "I do not know."}
    at_once = {"prompt": "x", "response": "\\boxed{7}"}
    source = file_source(settings(folder, tmp_path, without, GOOD, at_once))
    assert (len(source.responses), source.unusable) == (1, 2)


def test_a_limit_on_lines(folder, tmp_path):
    limited = dataclasses.replace(settings(folder, tmp_path, GOOD, GOOD, "not read"), responses=2)
    assert len(file_source(limited).responses) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: must be an object"),
        ({"prompt": "x"}, "line 2, field 'response': missing"),
        ({"prompt": 3, "response": "x"}, "line 2, field 'prompt': must be text, got int"),
        ({"prompt_ids": ["a"], "response": "x"}, "line 2, field 'prompt_ids': must be a list of whole numbers"),
        ({"prompt": "x", "response_ids": [99999]}, "line 2, field 'response_ids': 99999 is not in the vocabulary"),
        ({**GOOD, "correct": "yes"}, "line 2, field 'correct': must be true or false, got 'yes'"),
        (
            {"prompt": "x", "response_ids": [5] * 70},
            "line 2, field 'response': 7.* tokens with the prompt, the model allows 64",
        ),
    ],
)
def test_a_bad_line_is_named(folder, tmp_path, line, complaint):
    with pytest.raises(BadResponses, match=complaint):
        file_source(settings(folder, tmp_path, GOOD, line))


def test_nothing_to_score_is_an_error_that_says_why(folder, tmp_path):
    with pytest.raises(ValueError, match="none of 1 responses has reasoning and an answer written as boxed"):
        file_source(settings(folder, tmp_path, {"prompt": "x", "response": "no"}))
    with pytest.raises(BadResponses, match="no line with a response"):
        file_source(settings(folder, tmp_path, ""))
    with pytest.raises(BadResponses, match="cannot be read"):
        file_source(dataclasses.replace(settings(folder, tmp_path), responses_file=tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"has no config.json"):
        file_source(dataclasses.replace(settings(folder, tmp_path, GOOD), model=tmp_path))


def test_the_command_runs_on_a_model_from_disk(folder, tmp_path, capsys):
    chosen = settings(folder, tmp_path, GOOD, {**GOOD, "correct": False})
    words = ["--model", str(folder), "--responses-file", str(chosen.responses_file), "--rounds", "1", "--curves", "1"]
    out = tmp_path / "out"
    assert main(["bench", "fidelity", *words, "--dtypes", "float32", "--device", "cpu", "--out", str(out)]) == 0
    assert {file.suffix for file in out.iterdir()} >= {".md", ".json", ".html"}
    assert "exact OAR-P" in capsys.readouterr().out
    assert main(["bench", "fidelity", "--model", str(folder)]) == 2
    assert "belong together" in capsys.readouterr().err
