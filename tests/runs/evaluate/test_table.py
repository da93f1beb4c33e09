"""`oar eval` on the committed responses of a tiny evaluation: three methods with one, two and three seeds, two data sets; and
with vLLM on a CPU."""

import json
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("vllm")

from oar_plugin.cli.main import main
from oar_plugin.runs.evaluate import responses

TINY = Path(__file__).parent / "tiny"
GIVEN = json.loads((TINY / "responses.json").read_text())
MODELS = {"base": ["base0"], "grpo": ["grpo0", "grpo1"], "o|ar": ["o|ar0", "o|ar1", "o|ar2"]}


def answers(model, requests, tensor_parallel):
    """What vLLM would write."""
    asked = [json.loads(request) for request in requests]
    (size,) = (name for name, truths in GIVEN["truths"].items() if 4 * len(truths) == len(asked))
    texts = [text for row in GIVEN["models"][Path(model).name][size] for text in row]
    rows = [{"error": None, "response": {"body": {"choices": [{"message": {"content": text}}]}}} for text in texts]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(responses, "_answers", answers)
    for model in GIVEN["models"]:
        for name in ("config.json", "model.safetensors"):
            Path(model).mkdir(exist_ok=True)
            Path(model, name).write_text("{}")
    for name, truths in GIVEN["truths"].items():
        rows = [{"prompt": [{"content": f"Say {t}."}], "reward_model": {"ground_truth": t}} for t in truths]
        pq.write_table(pa.Table.from_pylist(rows), f"{name}.parquet")
    lines = [f"{name}={','.join(models)}" for name, models in MODELS.items()]
    return lambda *words: main(["eval", *lines, "--data", "small.parquet,large.parquet", "--k", "4", *words])


def test_the_table_and_its_estimates_are_the_committed_ones(evaluate, capsys):
    assert evaluate("--baseline", "grpo") == 0
    table = Path("evaluation/table.md").read_text()
    assert table == (TINY / "table.md").read_text()
    said = capsys.readouterr()
    assert said.out.startswith(table)
    assert "oar eval: base, small: 25% of the responses give no answer" in said.err

    tables = json.loads(Path("evaluation/results.json").read_text())["mean, error and 95 % interval"]
    for line in json.loads((TINY / "results.json").read_text()):
        for suffix, estimates in (("", line["estimates"]), (" - grpo", line["minus_baseline"])):
            for metric in estimates.keys() & tables.keys():
                found = tables[metric][line["method"] + suffix][line["data"]]
                assert found == pytest.approx([*estimates[metric].values()], abs=1e-12)


def test_finished_sets_are_not_generated_again_and_other_weights_or_settings_are(evaluate, monkeypatch):
    asked = []

    def counted(model, requests, tensor_parallel):
        asked.append(model)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answers(model, requests, tensor_parallel)

    monkeypatch.setattr(responses, "_answers", counted)
    assert [evaluate(), evaluate(), evaluate(), len(asked)] == [130, 0, 0, 3 + 12 - 2]
    Path("grpo1", "model.safetensors").write_text("other")
    assert [evaluate(), len(asked)] == [0, 13 + 2]
    assert [evaluate("--top-p", "0.5"), len(asked)] == [0, 15 + 12]


def test_without_a_grader_it_says_why(evaluate, capsys, monkeypatch):
    monkeypatch.setattr("oar_plugin.runs.evaluate.table.grade", mock.Mock(side_effect=ImportError("no grader here")))
    assert evaluate() == 1
    assert "no grader here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("nowhere/at/all", 1, "neither a folder nor a name on the hub"),
        ("other", 1, "other: holds no model"),
        ("a=,base0", 2, "NAME=CHECKPOINT"),
        ("base0 --baseline grpo", 2, "names: base0"),
        ("base0 --temperature 0 --k 4", 2, "--k 1"),
        ("base0 --data small.parquet,other/small.parquet", 1, "two sets have the same name"),
        ("base0 --data none.parquet", 1, "cannot read none.parquet"),
        ("base0 --data aime24", 1, "oar data aime24 --out"),
    ],
)
def test_wrong_input_is_named(words, status, said, evaluate, capsys):
    Path("other").mkdir()
    Path("other/small.parquet").write_bytes(Path("small.parquet").read_bytes())
    words = words.split() if "--data" in words else [*words.split(), "--data", "small.parquet"]
    try:
        found = main(["eval", *words])
    except SystemExit as exit_:
        found = exit_.code
    assert found == status
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_vllm_answers_and_the_reward_grades(assets, tmp_path, capsys):
    words = ["--data", str(assets / "data.parquet"), "--k", "1", "--temperature", "0", "--max-tokens", "32"]
    assert main(["eval", f"one={assets}/model", f"same={assets}/model", *words, "--out", str(tmp_path)]) == 0
    (rows,) = json.loads((tmp_path / "results.json").read_text())["mean, error and 95 % interval"].values()
    assert 0.1 < rows["one"]["data"][0] < 0.95, "some right, some wrong"
    assert rows["same - one"]["data"] == [0, 0, 0, 0]
    assert f"| one | {100 * rows['one']['data'][0]:.1f} ± " in capsys.readouterr().out
    assert len(list((tmp_path / "responses").iterdir())) == 1
