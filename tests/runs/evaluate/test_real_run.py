"""`oar eval` with vLLM on a CPU: a tiny model that was trained for ten seconds, and the same with noise on its weights."""

import json
import shutil

import pytest
import torch

pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM, AutoTokenizer

from oar_plugin.cli.main import main
from oar_plugin.runs.evaluate.generate import ResponseFile

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


def test_an_interrupted_evaluation_goes_on_to_the_numbers_of_one_in_a_piece(folder, monkeypatch, capsys):
    def evaluate(out, *lines):
        words = ["--data", str(folder / "data.parquet"), "--k", "1", "--temperature", "0", "--max-tokens", "32"]
        return main(["eval", *lines, *words, "--out", str(folder / out)])

    def lines(out):
        return {line["method"]: line for line in json.loads((folder / out / "results.json").read_text())["lines"]}

    clean, noisy = f"clean={folder}/model", f"noisy={folder}/noisy"
    assert evaluate("whole", clean) == 0

    add, few = ResponseFile.add, 5

    def stop_after_a_few(file, response):
        if len(file.responses) == few:
            raise KeyboardInterrupt
        add(file, response)

    with monkeypatch.context() as patch:
        patch.setattr(ResponseFile, "add", stop_after_a_few)
        assert evaluate("parts", clean) == 130
    (file,) = (folder / "parts" / "responses").iterdir()
    kept = file.read_bytes()
    assert kept.count(b"\n") == 1 + few
    file.write_bytes(kept[:-7])  # the last line was being written

    capsys.readouterr()
    assert evaluate("parts", clean, noisy) == 0
    assert file.read_bytes().startswith(kept[: kept[:-1].rfind(b"\n")]), "what was there is kept"
    whole, parts = lines("whole"), lines("parts")
    assert parts["clean"] == whole["clean"]
    assert 0.1 < whole["clean"]["estimates"]["avg@1"]["mean"] < 0.95, "some right, some wrong"

    difference = parts["noisy"]["minus_baseline"]["avg@1"]
    means = [parts[name]["estimates"]["avg@1"]["mean"] for name in ("noisy", "clean")]
    assert difference["mean"] == pytest.approx(means[0] - means[1])
    shown = capsys.readouterr().out
    assert f"{100 * difference['mean']:+.1f} ± {100 * difference['se']:.1f}" in shown
    assert (folder / "parts" / "table.md").read_text().startswith("## avg@1")
