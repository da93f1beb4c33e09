"""`oar report`: what it says where there is nothing to report, or a package is missing."""

import json
import sys

import pytest

from oar_plugin.cli.main import main


@pytest.mark.parametrize(
    ("place", "hidden", "status", "said"),
    [
        ("nowhere", None, 2, "nowhere: No such file or directory"),
        ("empty", None, 2, "empty: no logs of verl, looked for metrics/start*.jsonl"),
        ("rollouts.jsonl", None, 2, "rollouts.jsonl: no step in it"),
        ("empty.wandb", None, 2, "empty.wandb: no step in it"),
        ("broken", None, 2, "run.yaml: not a valid run.yaml (KeyError)"),
        ("empty.wandb", "wandb", 1, "wandb is not installed here; pip install wandb"),
        ("events.out.tfevents.1", "tensorboard", 1, "tensorboard is not installed here; pip install tensorboard"),
        ("metrics.jsonl", "scipy", 1, "scipy is not installed here; pip install"),
        ("broken", "yaml", 1, "yaml is not installed here; pip install pyyaml"),
    ],
)
def test_what_cannot_be_reported_is_one_line(place, hidden, status, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "broken/metrics"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "input": "1+1?"}\n[]\nnull\n7\n')
    for file in ("broken/metrics/start.jsonl", "metrics.jsonl"):
        (tmp_path / file).write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}}))
    (tmp_path / "broken" / "run.yaml").write_text("settings: {}\n")
    for file in ("empty.wandb", "events.out.tfevents.1"):
        (tmp_path / file).touch()
    for name in [name for name in sys.modules if hidden and name.startswith(f"{hidden}.")]:
        monkeypatch.delitem(sys.modules, name)
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
        for module in ("report.page", "report.logs", "run_folder"):  # import scipy and yaml
            monkeypatch.delitem(sys.modules, f"oar_plugin.runs.{module}", raising=False)
    assert main(["report", place]) == status
    error = capsys.readouterr().err
    assert said in error
    assert (error.startswith("oar report: "), error.count("\n")) == (True, 1)


def test_runs_are_found_up_to_two_folders_below_and_methods_are_not_mixed(tmp_path, capsys):
    pytest.importorskip("matplotlib")

    def run(name, score):
        (tmp_path / "oar" / name).mkdir(parents=True)
        rows = ({"step": step, "data": {"critic/score/mean": score, "timing_s/step": 1.0}} for step in (1, 2))
        (tmp_path / "oar" / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    for seed in (1, 2):
        run(f"math-oar-s{seed}", 0.25)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    assert "math-oar-s1" in (tmp_path / "page" / "report.html").read_text()
    assert "math-oar-s2" in (tmp_path / "page" / "report.html").read_text()
    run("math-grpo-s1", 0.5)
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 2
    assert "--baseline" in capsys.readouterr().err
