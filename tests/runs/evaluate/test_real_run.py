"""`oar eval` with vLLM on a CPU: a tiny model that was trained for ten seconds, and the same with noise on its weights."""

import json
import shutil

import pytest
import torch

pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM, AutoTokenizer

from oar_plugin.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory):
    folder = shutil.copytree(assets, tmp_path_factory.mktemp("eval"), dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder / "noisy")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "noisy")
    return folder


def test_vllm_answers_the_reward_grades_and_a_worse_model_is_seen(folder, capsys):
    lines = [f"clean={folder}/model", f"noisy={folder}/noisy"]
    words = ["--data", str(folder / "data.parquet"), "--k", "1", "--temperature", "0", "--max-tokens", "32"]
    assert main(["eval", *lines, *words, "--out", str(folder / "out")]) == 0
    (rows,) = json.loads((folder / "out" / "results.json").read_text())["mean, error and 95 % interval"].values()
    clean, noisy, (difference, error, *_) = (rows[name]["data"] for name in ("clean", "noisy", "noisy - clean"))
    assert 0.1 < clean[0] < 0.95, "some right, some wrong"
    assert difference == pytest.approx(noisy[0] - clean[0])
    assert f"{100 * difference:+.1f} ± {100 * error:.1f}" in capsys.readouterr().out
    assert len(list((folder / "out" / "responses").iterdir())) == 2
