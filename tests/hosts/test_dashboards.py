"""One group of responses on the real dashboards, offline, through verl's own loggers, and read back."""

import html
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from verl.utils.tracking import Tracking

from oar_plugin.hosts.verl import viewer
from tests.hosts.test_dump import World
from tests.page.dumped import HEADER, RESPONSE

SCALARS = {"oar/ess_ratio": 0.5, "critic/score/mean": 0.25}


def shown(name, tmp_path, monkeypatch):
    """Two steps as verl's trainer has them: the responses first, then the step's scalars. Returns whether each failed."""
    monkeypatch.chdir(tmp_path)
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for variable, value in (variables | {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns"}).items():
        monkeypatch.setenv(variable, value)
    tracking = Tracking("project", "run", ["console", name], config={"trainer": {"nnodes": 1}})
    assert name in tracking.logger
    world, failed = World(tmp_path, dir=None, every=2), []
    for step in (1, 2):
        failed.append(world.show(step, tracking.logger)["oar/dashboard_failed"])
        tracking.log(SCALARS, step)
    tracking.finish()
    return failed


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # the folder of another test's run stays for the life of a process
    rows, log = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, data, **how: rows.append((data, how)) or log(run, data, **how))
    assert shown("wandb", tmp_path, monkeypatch) == [0, 0]
    wandb.teardown()  # waits for the process that writes the files
    assert [(*data, how) for data, how in rows[::2]] == [
        ("oar/responses", {"step": step, "commit": False}) for step in (1, 2)
    ], "sent with the step's scalars"
    pages = [page.read_text() for page in tmp_path.glob("wandb/offline-*/files/media/html/oar/*.html")]
    assert sorted(re.findall(r" · step (\d)</h1>", "".join(pages))) == ["1", "2"]


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")

    assert shown("mlflow", tmp_path, monkeypatch) == [0, 0]
    client = mlflow.MlflowClient(f"file://{tmp_path}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.data.metrics.items() >= SCALARS.items()
    for step in (1, 2):
        file = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=f"oar/step_00000{step}.html")
        assert f" · step {step}</h1>" in Path(file).read_text()


def test_one_that_fails_is_counted_and_leaves_the_others_alone(tmp_path, monkeypatch, caplog):
    def fail(*arguments):
        raise ConnectionError("no route")

    seen = []
    monkeypatch.setattr(viewer, "DASHBOARDS", {"wandb": fail, "tensorboard": lambda *shown: seen.append(shown)})
    world, loggers = World(tmp_path), {"wandb": 1, "tensorboard": 2, "console": 3}
    with caplog.at_level(logging.WARNING, "oar_plugin"):
        metrics = [world.show(step, loggers) for step in (1, 2, 3)]
    assert [one["oar/dashboard_failed"] for one in metrics] == [1, 0, 1]
    assert [one["oar/dump_failed"] for one in metrics] == [0, 0, 0]
    (said,) = caplog.records
    assert "wandb failed" in said.getMessage()
    assert [(logger, step, [row.uid for row in rows]) for logger, step, rows, _ in seen] == [
        (2, step, ["a_0_0", "a_1_0"]) for step in (1, 3)
    ]


def test_hostile_text_stays_text_in_tensorboard():
    """As its own text plugin renders it: one block of code, with nothing in it."""
    from tensorboard.plugin_util import markdown_to_safe_html

    hostile = ["    4\n\n", "**no** ", "</code></pre><script>x()</script>", "[a](javascript:x)\n"]
    hostile += ["\u202e\x00", "# `b` &lt;\n<p>\n"]
    rows = {"tokens": hostile, "token_ids": [*range(6)], "weights": [1.5, 0.5] * 3, "segments": [1] * 6}
    rows |= {"importance": {}, "log_probs": None, "entropies": None}
    response, texts = replace(RESPONSE, **rows, prompt="<b>4 + *3*\n```", truth="<i>7", uid="\n<h1>"), []
    writer = SimpleNamespace(add_text=lambda name, text, step: texts.append(text))
    viewer.DASHBOARDS["tensorboard"](SimpleNamespace(writer=writer), 1, [response], HEADER)
    assert all(line.startswith("    ") for line in texts[0].splitlines())
    rendered = markdown_to_safe_html(texts[0])
    assert set(re.findall(r"</?\w+", rendered)) == {"<pre", "<code", "</code", "</pre"}
    said = (
        "[[    4\n\n]]**no** [[</code></pre><script>x()</script>]][a](javascript:x)\n[[\\u202e\\x00]]# `b` &lt;\n<p>\n"
    )
    assert [text for text in ("<b>4 + *3*\n```", "truth <i>7", said) if text not in html.unescape(rendered)] == []
