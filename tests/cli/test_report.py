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
        ("metrics.jsonl", "scipy", 1, "scipy is not installed here; pip install scipy"),
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
        monkeypatch.delitem(sys.modules, "oar_plugin.runs.report.page", raising=False)  # imports scipy
    assert main(["report", place]) == status
    error = capsys.readouterr().err
    assert said in error
    assert (error.startswith("oar report: "), error.count("\n")) == (True, 1)
