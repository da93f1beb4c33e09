"""`oar eval` with vLLM on a CPU: a tiny model that was trained for ten seconds."""

import json

import pytest

pytest.importorskip("vllm")

from oar_plugin.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_vllm_answers_and_the_reward_grades(assets, tmp_path, capsys):
    words = ["--data", str(assets / "data.parquet"), "--k", "1", "--temperature", "0", "--max-tokens", "32"]
    assert main(["eval", f"one={assets}/model", f"same={assets}/model", *words, "--out", str(tmp_path)]) == 0
    (rows,) = json.loads((tmp_path / "results.json").read_text())["mean, error and 95 % interval"].values()
    assert 0.1 < rows["one"]["data"][0] < 0.95, "some right, some wrong"
    assert rows["same - one"]["data"] == [0, 0, 0, 0]
    assert f"| one | {100 * rows['one']['data'][0]:.1f} ± " in capsys.readouterr().out
    assert len(list((tmp_path / "responses").iterdir())) == 1
