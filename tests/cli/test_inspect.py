"""`oar inspect`: a run's dump, or responses with credit from a model of random weights, as page or text."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import oar_plugin
from benchmarks.tiny.model import Shape, model_of
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.cli.main import main
from oar_plugin.page.inspector import inspector_page
from oar_plugin.page.sources import read
from tests.page.dumped import HEADER, write_dump

PROMPT, ANSWERS = "1+1=", ("so größer 2 😀 #### 2", "hmm #### 3", "no", "", "x " * 60)
CASES = json.loads((Path(__file__).parents[1] / "runs" / "rows.json").read_text("utf-8"))
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A Llama whose tokens are bytes, for at most 100 positions."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer(by_bytes=True)
    model_of(Shape(32, 64, 2, 2, 2, vocab=len(tokenizer)), 100, architecture="llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dump(tmp_path / "dump", 1, 2)
    rows = [{"prompt": CHAT if n else PROMPT, "response": text, "truth": 2} for n, text in enumerate(ANSWERS)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def scored(model_folder, monkeypatch):
    """Scores a file with the model, and returns what the page is made of: responses and header."""

    def run(*words):
        page = mock.Mock(return_value="")
        monkeypatch.setattr("oar_plugin.page.inspector.inspector_page", page)
        assert main(["inspect", "mine.jsonl", "--model", str(model_folder), *words]) == 0
        return page.call_args.args[:2]

    return run


def test_a_model_gives_credit(here, scored, model_folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    responses, header = scored("probe=last", "--importance", "oar_g,fisher", "algorithm.oar.sigma=0.01", "tau=0.5")
    assert "scoring" in capsys.readouterr().err
    first, second, silent, empty, _ = responses
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    settings = {"probe": "last", "sigma": 0.01, "tau": 0.5}
    asked = tokenizer.apply_chat_template(CHAT, tokenize=False)
    for row, prompt, text in ((first, PROMPT, ANSWERS[0]), (second, asked, ANSWERS[1])):
        given = {"prompts": [prompt], "responses": [text], "tokenizer": tokenizer}
        for name in ("oar_g", "fisher"):
            credit = oar_plugin.importance(model, **given, importance=name, **settings)
            begin = credit.input_ids.shape[1] - len(row.tokens)
            assert row.importance[name] == credit.importance[0, begin:].tolist()
            if name == "oar_g":
                assert row.weights == credit.weights[0, begin:].tolist()
        assert row.prompt == prompt
    assert "\\xc3" in first.tokens, "a half of a character"
    assert [row.reward for row in responses] == [1, 0, 0, 0, 0], "graded"
    assert [row.advantage for row in (first, second)] == [None, pytest.approx(0)], "PROMPT and CHAT are two groups"
    assert [row.status for row in (first, silent, empty)] == ["scored", "no_answer", "no_answer"]
    assert (header.config["tau"], header.config["importance"]) == (0.5, "oar_g")
    assert header.arbitrary_scale == {"oar_g": False, "fisher": True}


@pytest.mark.parametrize(
    ("rows", "read"),
    [
        # (r - mean) / (std + 1e-6) with mean 1/3 and std sqrt(1/3)
        (({"reward": 1}, {"reward": 0}, {"reward": 0}), [1.154698, -0.577349, -0.577349]),
        (({"reward": 1}, {}, {"reward": 0}), [None] * 3),
    ],
)
def test_advantages_are_those_of_grpo_where_all_rewards_of_a_group_are_known(rows, read, here, scored):
    lines = [{"input": PROMPT, "output": "x #### 2", "data_source": "d", **row} for row in rows]  # verl's names
    (here / "mine.jsonl").write_text("\ufeff" + "".join(json.dumps(line) + "\n" for line in lines))
    responses, _ = scored()
    assert [row.advantage for row in responses] == [x and pytest.approx(x, abs=1e-6) for x in read]
    assert [row.source for row in responses] == ["d"] * 3


@pytest.mark.parametrize(("row", "read"), CASES["inspect"])
def test_a_row_is_read_as_it_is_meant_or_refused_with_its_line(row, read, here, scored, model_folder, capsys):
    (here / "mine.jsonl").write_text(f"\n{json.dumps(row)}\n")
    if isinstance(read, str):
        assert main(["inspect", "mine.jsonl", "--model", str(model_folder)]) == 2
        assert f"oar inspect: mine.jsonl, {read}" in capsys.readouterr().err
    else:
        assert [[found.prompt, found.truth, found.reward] for found in scored()[0]] == [read]


def test_a_dump_of_verls_says_what_its_rows_lack(here, model_folder, capsys):
    rows = [{"input": "A", "output": "x #### 5", "gts": {"n": 1}, "score": score} for score in (1.0, float("nan"), 0.0)]
    (here / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", "mine.jsonl", "--model", str(model_folder), "--format", "text"]) == 0
    said = capsys.readouterr()
    assert "3 of 3 rows have a truth or score that cannot be used and is left out, first mine:1: {'gts':" in said.err
    heads = [line.split("  ")[-3:] for line in said.out.splitlines() if line.startswith("step")]
    assert heads == [["no advantage", reward, "no truth"] for reward in ("reward 1", "no reward", "reward 0")]


def test_without_a_grader_it_says_why(here, model_folder, capsys, monkeypatch):
    monkeypatch.setattr("oar_plugin.cli.score.scored", mock.Mock(side_effect=ImportError("no grader here")))
    assert main(["inspect", "mine.jsonl", "--model", str(model_folder)]) == 1
    assert "no grader here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("tau=0.5", 2, "SOURCE is missing"),
        ("dump tau=0.5", 2, "tau=0.5: is for scoring; add --model"),
        ("dump/step_000001.jsonl --model MODEL", 2, "line 1: prompt: Field required"),
        ("dump --format text --out x", 2, "--out: is for pages; leave out --format text"),
        ("nowhere", 2, "nowhere: No such file or directory"),
        ("mine.jsonl --model MODEL --steps 1", 2, "--steps: is for a run's dump"),
        ("bad.jsonl --model MODEL", 2, "bad.jsonl, line 2: reward: Input should be a finite number"),
        ("mine.jsonl --model MODEL --importance fishr", 2, "importance='fishr': unknown; allowed: fisher, "),
        ("mine.jsonl --model MODEL tua=0.5", 2, "algorithm.oar.tua=0.5: unknown key; did you mean algorithm.oar.tau?"),
        ("mine.jsonl --model MODEL tau=[", 2, "while parsing a flow node"),
        ("mine.jsonl --model nowhere", 1, "--model=nowhere: nowhere: neither a folder nor a name on the hub"),
        ("mine.jsonl --model PICKY", 2, "no users"),
    ],
)
def test_a_fault_of_the_user_is_a_message(words, status, said, here, model_folder, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(model_folder, here / "PICKY")
    (here / "PICKY" / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    (here / "bad.jsonl").write_text('{"prompt": "1", "response": "2"}\n{"prompt": "1", "response": "2", "reward": NaN}')
    assert main(["inspect", *words.replace("MODEL", str(model_folder)).split()]) == status
    err = capsys.readouterr().err
    assert said in err
    assert err.count("oar inspect: ") == 1


def test_text_marks_what_was_paid_more_and_cannot_steer_a_terminal(here, capsys):
    tokens = ["\x1b[31m", "‮]]\0", " #### ", "<b>[bold]"]
    write_dump(here / "dump", 2, tokens=tokens)
    assert main(["inspect", "dump", "--format", "text"]) == 0
    plain = capsys.readouterr().out
    assert "so[[ 2]] #### 2\n" in plain
    assert "\\x1b[31m[[\\u202e]]\\x00]] #### <b>[bold]\n" in plain


def test_the_page_is_opened_in_the_readers_browser(here, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert main(["inspect", "dump", "--steps", "2", "--open"]) == 0
    assert capsys.readouterr().out.startswith("1 responses of steps 2: dump/inspect.html (")
    assert opened == [(here / "dump/inspect.html").resolve().as_uri()]


def test_where_settings_differ_between_steps_the_page_shows_weights_as_recorded(here, capsys):
    header = replace(HEADER, config={**HEADER.config, "beta": 3.0}, run="a")
    write_dump(here / "dump", 3, header=header)
    assert main(["inspect", "dump"]) == 0
    assert "weights are as recorded" in capsys.readouterr().err
    assert (here / "dump/inspect.html").read_text() == inspector_page(read([here / "dump"]).items, header, "a", True)
