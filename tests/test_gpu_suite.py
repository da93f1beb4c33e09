"""The parts of tests/gpu that need no GPU; `VERL_PLATFORM=cpu bash tests/gpu.sh` rehearses the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import check_runs, here
from tests.gpu.plugin import REHEARSED, Result, write
from tests.processes import run

FOLDER = Path(__file__).parent
RECIPES = check_runs.test_two_steps_of_a_recipe.pytestmark[0].args[1]
CARD = {"name": "Made up", "capability": "9.0", "gb": 80}


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"gpus": 2}, None),
        ({"gpus": 3}, "needs 3 GPUs, there are 2"),
        ({"packages": ("json", "nothing", "json.nothing")}, "needs nothing, json.nothing, not"),
        ({"memory_gb": 100}, "needs GPUs of 100 GB, the smallest has 80"),
    ],
)
def test_what_is_missing_is_named(needs, reason, monkeypatch):
    monkeypatch.setattr(here, "REHEARSAL", False)
    monkeypatch.setattr(here, "cards", lambda: [CARD, CARD])
    told = here.missing(**needs)
    assert told is None if reason is None else told.startswith(reason)


@pytest.mark.parametrize("rehearsal", [True, False])
def test_the_report_has_every_check(tmp_path, rehearsal):
    machine = {**here.describe(), "rehearsal": rehearsal, "gpus": [CARD]}
    results = [Result("a", "passed", 1.5, figures={"fisher": "2.0e-06"}), Result("b", "skipped", 0.0, "needs 8 GPUs")]
    write(tmp_path, machine, [*results, Result("c", "failed", 2.0, "the end of its output")])
    page, data = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    for said in ("Made up, 80 GB", "fisher: 2.0e-06", "needs 8 GPUs", "the end of its output"):
        assert said in page
    assert (REHEARSED in page) == rehearsal
    assert [one["outcome"] for one in data["results"]] == ["passed", "skipped", "failed"]
    assert data["machine"]["versions"]["pytest"] == pytest.__version__


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path):
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(pytest.fail.Exception, match="took longer than 1 s"):
        run(["-c", grandchild], tmp_path / "log", 1)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)status 3.*the last word"):
        run(["-c", "print('the last word'); raise SystemExit(3)"], tmp_path / "log", 60)


def test_without_a_gpu_it_says_how_to_rehearse():
    pytest.importorskip("verl")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", FOLDER / "gpu.sh"], env=environment, capture_output=True)
    assert done.returncode == 1
    assert b"VERL_PLATFORM=cpu bash tests/gpu.sh" in done.stderr


@pytest.mark.parametrize(("name", "gpus", "overrides"), [case.values for case in RECIPES])
def test_verl_and_oar_accept_the_runs_on_gpus(name, gpus, overrides, monkeypatch):
    pytest.importorskip("verl")
    from oar_plugin.runs.recipe import check_config, compose_recipe
    from verl_cpu import conf

    conf.register()
    monkeypatch.setenv("OAR_SMOKE", "/made/up")
    words = ["+cpu_smoke=tiny", *check_runs.sizes(gpus, overrides)]
    config = compose_recipe(FOLDER.parent / "recipes" / name, "oar", words)
    assert config.actor_rollout_ref.model.path == "/made/up/model"
    check_config(config)


def test_verl_accepts_the_benchmarks_run_on_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("verl")
    hydra = pytest.importorskip("hydra")
    from benchmarks.run import study
    from oar_plugin.hosts.verl.hydra_conf import command_line
    from oar_plugin.runs.recipe import check_config

    monkeypatch.setattr(study.Settings, "device", "cuda")
    overrides = study.overrides(study.Settings(), tmp_path, tmp_path, 4, "run")
    with command_line(overrides), hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=overrides)
    check_config(config)
    assert config.trainer.device == "cuda"
    assert config.actor_rollout_ref.rollout.enforce_eager is False
