"""The parts of tests/gpu that need no GPU; `VERL_PLATFORM=cpu bash tests/gpu.sh` rehearses the rest."""

from pathlib import Path

import pytest

from tests.gpu import check_runs
from tests.processes import run

FOLDER = Path(__file__).parent
RECIPES = check_runs.test_two_steps_of_a_recipe.pytestmark[0].args[1]


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path):
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(pytest.fail.Exception, match="took longer than 1 s"):
        run(["-c", grandchild], tmp_path / "log", 1)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)status 3.*the last word"):
        run(["-c", "print('the last word'); raise SystemExit(3)"], tmp_path / "log", 60)


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
