"""What every command does with wrong input, unwritable places, narrow terminals, pipes, other locales and no network."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from oar_plugin.cli.main import main, make_parser
from oar_plugin.runs.recipe import find_recipe
from tests.limits import PROCESS_S
from tests.page.dumped import HEADER, RESPONSE
from tests.tracked import ROOT

RECIPE = "qwen2_5_7b_math"
DUMP = [HEADER.line().strip(), json.dumps(vars(replace(RESPONSE, tokens=["größer", "⏎", "", ""])), ensure_ascii=False)]

AT_ONCE = [  # words, what is said
    ("plan X --gpu-memory 0", "--gpu-memory: 0: must be above 0"),
    ("plan X --gpu-memory nan", "--gpu-memory: nan: must be above 0"),
    ("plan X --scored-share 2", "--scored-share: 2: must be above 0 and at most 1"),
    ("launch X --seeds 0", "--seeds: 0: at least 1"),
    ("launch X --hosts --dry-run", "--hosts: expected one argument"),
    ("launch X --on ray --hosts a,,b", "--hosts: 'a,,b': a list"),
    ("inspect --steps 1,x DIR", "--steps: invalid"),
    *((f"{command} X --colour", "--colour") for command in ("plan", "launch", "inspect", "recipes", "doctor")),
]


def test_a_wrong_option_is_refused_with_the_usage_of_its_command_before_anything_is_imported():
    code = f"""
import contextlib, io, sys
from oar_plugin.cli.main import main
for words, said in {AT_ONCE!r}:
    err, words = io.StringIO(), words.split(" ")
    with contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as exit_:
            status = exit_.code
    shown = err.getvalue()
    assert (status, shown[:len(words[0]) + 11]) == (2, "usage: oar " + words[0]) and said in shown, (words, status, shown)
assert not {{"torch", "verl", "transformers", "datasets"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PROCESS_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A file where a folder should be, recipes with a broken yaml, a dump with lines that are none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for name, text in (("broken", "data: [1, {\n"), ("list", "- 1\n")):
        shutil.copytree(find_recipe(RECIPE), tmp_path / name)
        (tmp_path / name / "recipe.yaml").write_text(text)
    (tmp_path / "dump").mkdir()
    lines = [*DUMP, DUMP[1][:50], '{"a": 1}', "5", "", "[]"]
    (tmp_path / "dump/step_000003.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/train.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        *((f"{command} broken", 2, "recipe.yaml") for command in ("plan", "launch --dry-run")),
        *((f"{command} list", 2, "list/oar.yaml does not compose") for command in ("plan", "launch --dry-run")),
        ("data aime24 --from rows --out file/data", 1, "Not a directory: 'file"),
        ("inspect dump --out made/at/once.html", 0, "4 of 5 lines skipped"),
        ("inspect dump --out file/page.html", 2, "oar inspect: file"),
    ],
)
def test_a_fault_of_the_user_is_a_message_that_names_it(words, status, said, folder, capsys):
    assert main(words.split()) == status
    assert said in capsys.readouterr().err
    assert (folder / "made/at/once.html").is_file() == ("made" in words)


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (
            ["recipes"],
            "qwen2_5_7b_lora Qwen2.5-7B with LoRA on GSM8K and MATH: one node with 8 GPUs of 40 GB or more, FSDP2",
        ),
        (["plan", RECIPE], "generation 59.1 21.9 28.7% KV cache 37.8, vLLM 9.6, optimizer 7.1, weights 3.5, other 1.0"),
    ],
    ids=["recipes", "plan"],
)
def test_no_cell_is_cut_off_in_a_narrow_terminal_and_a_row_is_a_line_in_a_pipe(words, row, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    narrow = capsys.readouterr().out
    monkeypatch.delenv("COLUMNS")
    assert main(words) == 0
    pipe = capsys.readouterr().out
    assert row in [" ".join(line.split()) for line in pipe.splitlines()]
    assert max(map(len, narrow.splitlines()[:10])) <= 60
    letters = [Counter("".join(shown.replace("─", "").split())) for shown in (narrow, pipe)]
    assert letters[0] == letters[1]


def test_a_locale_without_the_letters_changes_nothing_but_how_they_look(tmp_path):
    (tmp_path / "step_3.jsonl").write_text("\n".join(DUMP), encoding="utf-8")
    code = """
from oar_plugin.cli.main import main
assert main(["inspect", "."]) == main(["inspect", ".", "--format", "text"]) == main(["recipes"]) == 0
print("Schl\\xfcssel \\u2192 \\u9375")
"""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    environment = {**os.environ, **locale, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, cwd=tmp_path, env=environment, timeout=PROCESS_S)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Schl?ssel" in done.stdout
    assert b"gr??er" in done.stdout
    assert (tmp_path / "inspect.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_shell_can_complete_every_command():
    """shtab takes the parser that knows all options, not the lazy one of `main`."""
    assert make_parser().parse_args(["plan", "x", "--gpu-memory", "8"]).gpu_memory == 8
    assert make_parser().parse_args(["inspect", "x", "--steps", "1,2"]).steps == [1, 2]
