"""`oar launch` says what is missing before it starts, and starts in spite of it only when told to."""

import os
import shutil

import pytest
import yaml

pytest.importorskip("verl")

from oar_plugin.cli.main import main
from oar_plugin.runs.recipe import find_recipe
from tests.cli.test_launch import FOUR, ONE, PODS, environment  # noqa: F401


def test_what_is_missing_stops_a_run_and_not_a_dry_one(capsys, monkeypatch):
    started = []

    def execvp(*words):
        started.append(words)
        raise SystemExit  # it does not return

    monkeypatch.setattr(os, "execvp", execvp)
    assert main(["launch", ONE, "--gpu", "H100", "--gpu-memory", "20"]) == 1
    said = capsys.readouterr()
    assert "oar launch: memory: missing: projected for GPUs of 20 GiB: does not fit, " in said.err
    assert "oar launch: data: missing: " in said.err
    assert "oar data gsm8k math math500" in said.err
    assert said.err.splitlines()[-1] == "oar launch: not started; --no-check starts it in spite of what is missing"
    assert (said.out, started) == ("", [])
    assert main(["launch", ONE, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "oar launch: data: missing: " in said.err
    assert "verl.trainer.main_ppo" in said.out
    with pytest.raises(SystemExit):
        main(["launch", ONE, "--no-check"])
    assert len(started) == 1


def test_a_run_says_how_long_it_takes_and_a_job_asks_for_the_time_that_is_given(capsys):
    words = ["launch", FOUR, "--on", "slurm", "--dry-run"]
    assert main([*words, "--max-time", "7", "--sbatch=--time=1"]) == 0
    said = capsys.readouterr()
    times = [line for line in said.out.splitlines() if line.startswith("#SBATCH --time=")]
    assert times == ["#SBATCH --time=7:00:00", "#SBATCH --time=1"]
    assert "GPU-hours on 32 GPUs" in said.err


def test_pods_run_their_own_copy_of_a_recipe_or_one_that_is_named(capsys, tmp_path):
    patch = tmp_path / "patch.yaml"
    patch.write_text("rayjob: {metadata: {labels: {queue: gpus}}}")
    assert main(["launch", FOUR, *PODS.split(), "--dry-run", "--patch", str(patch)]) == 0
    said = capsys.readouterr()
    made = yaml.safe_load(said.out)
    assert made["metadata"]["labels"] == {"queue": "gpus"}
    assert '--config-path "$$recipe"' in said.out
    assert str(find_recipe(FOUR)) not in said.out
    assert "data: not checked" in said.err
    shutil.copytree(find_recipe(FOUR), tmp_path / "mine")
    assert main(["launch", str(tmp_path / "mine"), *PODS.split(), "--dry-run"]) == 2
    assert f"{tmp_path}/mine: a folder of this machine, which pods do not have" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--gpu", "H1"], ["--gpu-memory", "-1"], ["--max-time", "9"]])
def test_options_that_cannot_work_are_wrong_input(words, capsys):
    assert main(["launch", ONE, *words]) == 2
    assert words[0] in capsys.readouterr().err
