"""The demo, short of training."""

import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("psutil")
pytest.importorskip("scipy")

from benchmarks.tiny.verl_run import read_metrics
from recipes.cpu_demo import demo, main, report
from recipes.cpu_demo.report import CAVEAT, Accuracy, MethodResult, Share
from recipes.cpu_demo.training import STAGES, Run, TrainingFailed, Watch, diagnose
from tests.page.dumped import RESPONSE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "it's (my) folder, {x}=1", "oar", steps=4, seed=3)
    made.folder.mkdir(parents=True)
    return made


def metrics_line(step, reward):
    return json.dumps({"step": step, "data": {"critic/score/mean": reward, "timing_s/step": 1.5}}) + "\n"


def test_methods_differ_in_nothing_but_the_estimator_and_their_folder(run):
    grpo = Run(run.parent, "grpo", run.steps, run.seed)
    theirs = {override.replace("/grpo/", "/oar/") for override in grpo.arguments()}
    assert all(override.startswith("algorithm.") for override in set(run.arguments()) - theirs)
    assert theirs - set(run.arguments()) == {"algorithm.adv_estimator=grpo"}


def test_the_watch_says_what_is_awaited_and_then_how_far_it_is(run):
    watch = Watch(run, Console(file=io.StringIO()))
    assert watch.status() == (0, f"starting verl (1/{len(STAGES)}): {STAGES[0][1]}")
    watch.on_line("noise")
    watch.on_line(f"(TaskRunner) {STAGES[2][0]} noise")
    assert f"4/{len(STAGES)}" in watch.status()[1]
    run.metrics_file.write_text(metrics_line(1, 0.25) + metrics_line(2, 0.75) + '{"step": 3, "da')  # half written
    assert [(row["step"], row["critic/score/mean"]) for row in read_metrics(run.metrics_file)] == [(1, 0.25), (2, 0.75)]
    assert watch.status() == (2, "step 2/4   reward 0.50   1.5 s a step   0:03 left")


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("OSError: No space left on device", "--out"),
        ("ray.exceptions.OutOfMemoryError", "memory"),
        ("RuntimeError: [Errno 98] Address already in use", "start again"),
        ("x\nValueError: what happened\ny", "ValueError: what happened"),
        ("", "before its last step"),
    ],
)
def test_a_failed_run_is_explained_in_one_line(tmp_path, log, advice):
    (tmp_path / "verl.log").write_text(log)
    said = diagnose(tmp_path / "verl.log")
    assert advice in said
    assert "\n" not in said


# ---- the command


def test_too_little_memory_is_one_line_that_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(main, "NEEDED_GB", 1e6)
    assert main.main(["--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "close other programs" in error or "run.sh" in error


def test_two_starts_do_not_share_a_folder_and_an_unwritable_place_is_one_line(monkeypatch, tmp_path, capsys):
    assert main.new_folder(tmp_path) != main.new_folder(tmp_path)
    monkeypatch.setattr(main, "find_obstacle", lambda: None)
    (tmp_path / "file").touch()
    assert main.main(["--out", str(tmp_path / "file")]) == 1
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (TrainingFailed("verl stopped: x"), 1, "verl stopped: x")],
)
def test_what_ends_it_early_is_one_line(monkeypatch, tmp_path, capsys, raised, status, said):
    def fail(*_):
        raise raised

    monkeypatch.setattr(main, "find_obstacle", lambda: None)
    monkeypatch.setattr(demo, "run_demo", fail)
    assert main.main(["--out", str(tmp_path)]) == status
    assert capsys.readouterr().err == f"cpu_demo: {said}\n"


@pytest.mark.parametrize("network", [True, False])
def test_run_sh_installs_and_starts_the_checkouts_own_demo(tmp_path, network):
    """From any folder, with programs that stand in for the environment's Python and for a machine with free memory."""
    python, awk = tmp_path / "venv" / "bin" / "python", tmp_path / "awk"
    python.parent.mkdir(parents=True)
    failure = "" if network else '*pip*) echo "Temporary failure in name resolution"; exit 1;; '
    python.write_text(f'#!/bin/sh\ncase "$*" in {failure}*cpu_demo*) echo "$PYTHONPATH" "$@";; esac\n')
    awk.write_text("#!/bin/sh\necho 99999\n")
    for program in (python, awk):
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "OAR_DEMO_VENV": str(tmp_path / "venv"), "PIP_INDEX_URL": "of no use"}
    script = ["bash", str(ROOT / "recipes/cpu_demo/run.sh"), "--steps", "3"]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    if network:
        assert done.stdout.splitlines()[-1] == f"{ROOT} {ROOT}/recipes/cpu_demo/main.py --steps 3"
    else:
        assert done.returncode == 1
        assert done.stderr.startswith("cpu_demo: install.sh: cannot reach the package index: check the network")


# ---- its report


def test_weights_are_averaged_by_kind_over_the_scored():
    row = replace(RESPONSE, tokens=["so", " 3", " =", " 7"], weights=[0.4, 0.6, 0.7, 2.3], segments=[1] * 4)
    kinds = report.weights_by_kind([row, replace(row, status="no_answer", weights=[9.0] * 4)])
    assert kinds == pytest.approx({"results": 2.3, "sums": 0.65, "filler words": 0.4})


def test_the_summary_has_the_numbers_the_files_and_the_caveat(tmp_path):
    metrics = [{"step": s, "critic/score/mean": 0.3 + 0.05 * s, "timing_s/step": 2.0} for s in range(1, 7)]
    before, after = (Accuracy(Share(right, 256), Share(right + 5, 256)) for right in (70, 180))
    result = MethodResult(after, metrics, seconds=100.0, start_up_seconds=60.0, peak_bytes=3 * 1024**3)
    console = Console(file=io.StringIO(), width=200, highlight=False, soft_wrap=True)
    files = {"curves": tmp_path / "report.html"}
    report.print_summary(console, before, {"oar": result}, {"results": 2.3}, 321.0, files)
    said = console.file.getvalue()
    numbers = ("27 %  [22, 33]", "70 %  [64, 76]", "after 6 steps of OAR", "2.0 s", "3.0 GB", "done in 5:21")
    assert [part for part in (*numbers, CAVEAT, str(files["curves"])) if part not in said] == []
