"""`oar launch` as a user calls it, with real verl, Ray and vLLM on a CPU: run, refused, resumed, finished."""

import json
import os
import subprocess
import sys

import pytest
import yaml

pytest.importorskip("verl")
pytest.importorskip("vllm")

from oar_plugin.runs.recipe import command
from recipes.smoke import make_assets
from tests.hosts.whole_run import LIMIT_S, RECIPES, whole_run
from verl_cpu.launch import cpu_environment
from verl_cpu.session import session

pytestmark = whole_run

RECIPE = "qwen2_5_7b_math"
OVERRIDES = ["+cpu_smoke=dp", "trainer.save_freq=1", "algorithm.oar.dump.dir=dump"]
NAME = f"{RECIPE}-oar-s2-dp-34198c"


def test_a_run_is_kept_apart_refused_resumed_and_not_done_twice(tmp_path):
    make_assets(tmp_path)
    folder = tmp_path / "made" / "oar" / NAME

    def call(words, **variables):
        done = subprocess.run(
            words, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=LIMIT_S
        )
        return done.returncode, done.stdout + done.stderr

    def launch(*words):
        return call([sys.executable, "-m", "oar_plugin.cli.main", "launch", RECIPE, "--seed", "2", *OVERRIDES, *words])

    def steps():
        files = sorted((folder / "metrics").iterdir(), key=lambda file: file.stat().st_mtime)
        return [[json.loads(line)["step"] for line in file.read_text().splitlines()] for file in files]

    with session() as opened:
        places = {"OAR_SMOKE": str(tmp_path), "OAR_CHECKPOINTS": str(tmp_path / "made")}
        environment = {**os.environ, **cpu_environment(), **opened.environment(), **places}
        environment["PYTHONPATH"] = str(RECIPES.parent)
        environment["COLUMNS"] = "200"  # what else runs in this process may have set a narrow one

        status, said = launch("trainer.total_training_steps=1")
        assert status == 0, said[-4000:]
        assert steps() == [[1]]
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
        assert (folder / "dump" / "step_000001.jsonl").exists()
        assert yaml.safe_load((folder / "run.yaml").read_text())["state"] == "finished"
        assert {path.name for path in tmp_path.iterdir()} == {"model", "data.parquet", "made"}, "nothing is elsewhere"

        # The driver itself refuses: a login node may not see the folder.
        other = [f"trainer.experiment_name={NAME}", "trainer.total_training_steps=1", "data.seed=3"]
        words = command(RECIPES / RECIPE, "oar", [*OVERRIDES, *other])
        status, said = call([sys.executable, *words[1:]])
        assert status == 2, said[-4000:]
        assert f"{folder} holds a run with other settings" in said
        assert "  data.seed: 2 there, 3 now" in said

        status, said = launch("trainer.total_training_steps=2")
        assert status == 2, said[-4000:]
        assert "  trainer.total_training_steps: 1 there, 2 now" in said
        status, said = launch("trainer.total_training_steps=2", "--resume")
        assert status == 0, said[-4000:]
        assert steps() == [[1], [2]]

        status, said = launch("trainer.total_training_steps=2")
        assert status == 0, said[-4000:]
        (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == [NAME]]
        assert row[1:5] == ["finished", "2", "of", "2"]
        assert row[6:8] == ["(step", "2)"], "validated"
        assert steps() == [[1], [2]], "nothing was started"
