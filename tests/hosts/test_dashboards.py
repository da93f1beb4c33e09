"""Histograms and pages on the real dashboards, offline, through verl's own loggers, and read back with each one's reader."""

import html
import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl")

from oar_plugin.runs.report.logs import _wandb_records
from verl.utils.tracking import Tracking

from oar_plugin.hosts.verl import viewer
from oar_plugin.hosts.verl.dashboards import Picture, code_block
from tests.hosts.test_dump import World
from tests.page.dumped import RESPONSE

SCALARS = {"oar/ess_ratio": 0.5, "critic/score/mean": 0.25}


def shown(name, tmp_path, monkeypatch):
    """Two steps as verl's trainer has them: media first, then the step's scalars. The viewer's metrics of each."""
    monkeypatch.chdir(tmp_path)
    places = {"TENSORBOARD_DIR": f"{tmp_path}/board", "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns"}
    switches = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for variable, value in (places | switches).items():
        monkeypatch.setenv(variable, value)
    tracking = Tracking("project", "run", ["console", name], config={"trainer": {"nnodes": 1}})
    assert name in tracking.logger
    world, metrics = World(tmp_path, dir=None, every=2), []
    for step in (1, 2):
        metrics.append(world.show(step, tracking.logger))
        tracking.log(SCALARS, step)
    tracking.finish()
    return metrics


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # the folder of another test's run stays for the life of a process
    from wandb.proto.wandb_internal_pb2 import Record

    metrics = shown("wandb", tmp_path, monkeypatch)
    assert [one["oar/dashboard_failed"] for one in metrics] == [0, 0]
    wandb.teardown()  # waits for the process that writes the file
    (file,) = tmp_path.glob("wandb/offline-*/*.wandb")
    history = []
    for data in _wandb_records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append({".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    assert [row["_step"] for row in history] == [1, 2], "a row a step: media and scalars are of one"
    for row in history:
        assert row.items() >= SCALARS.items()
        assert sum(row["oar/weights.values"]) == 23, "reasoning tokens"
        assert sum(row["oar/importance_log10.values"]) == 23
        page = next(tmp_path.glob(f"wandb/offline-*/files/{row['oar/responses.path']}")).read_text()
        assert f" · step {row['_step']}</h1>" in page


def test_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [one["oar/dashboard_failed"] for one in shown("tensorboard", tmp_path, monkeypatch)] == [0, 0]
    board = EventAccumulator(str(tmp_path / "board"), {"histograms": 0, "tensors": 0}).Reload()
    assert set(board.Tags()["scalars"]) == set(SCALARS)
    for name in ("oar/weights", "oar/importance_log10"):
        assert [(event.step, event.histogram_value.num) for event in board.Histograms(name)] == [(1, 23), (2, 23)]
    texts = [event.tensor_proto.string_val[0].decode() for event in board.Tensors("oar/responses/text_summary")]
    assert len(texts) == 2
    assert all("scored  advantage 1  reward 1" in text and "[[" in text for text in texts)


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")

    assert [one["oar/dashboard_failed"] for one in shown("mlflow", tmp_path, monkeypatch)] == [0, 0]
    client = mlflow.MlflowClient(f"file://{tmp_path}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.data.metrics.items() >= SCALARS.items()
    assert [point.step for point in client.get_metric_history(run.info.run_id, "oar/weights/p99")] == [1, 2]
    for step in (1, 2):
        file = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=f"oar/step_00000{step}.html")
        assert f" · step {step}</h1>" in Path(file).read_text()


def test_one_that_fails_is_counted_and_leaves_the_others_alone(tmp_path, monkeypatch, caplog):
    def fail(logger, picture):
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
    assert [(logger, picture.step) for logger, picture in seen] == [(2, 1), (2, 3)]
    world.show(3, loggers)
    assert len(seen) == 2, "a step's second batch is not drawn over its first"


def test_weights_that_are_almost_the_same_are_counted():
    weights, importance = np.array([[1, 1 + 1.2e-7], [1e-3, 1e-3 + 8e-10]], np.float32)
    for found in Picture(1, weights, importance, [], None).histograms.values():
        assert np.histogram(found, 64)[0].sum() == 2


def test_weights_of_responses_that_were_not_scored_are_no_kinds():
    both = [RESPONSE], [RESPONSE, replace(RESPONSE, status="no_answer")]
    tables = [code_block(rows).partition("how many")[2] for rows in both]
    assert tables[0] == tables[1]


def test_no_dashboard_is_imported_that_is_not_on():
    code = "import sys, oar_plugin.hosts.verl.viewer as v; print([n for n in v.DASHBOARDS if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"


def test_hostile_text_stays_text_in_tensorboard():
    """As its own text plugin renders it: one block of code, with nothing in it."""
    from tensorboard.plugin_util import markdown_to_safe_html

    hostile = ["    4\n\n", "**no** ", "</code></pre><script>x()</script>", "[a](javascript:x)\n"]
    hostile += ["\u202e\x00", "# `b` &lt;\n<p>\n"]
    rows = {"tokens": hostile, "token_ids": [*range(6)], "weights": [1.5, 0.5] * 3, "segments": [1] * 6}
    nothing = {"importance": {}, "log_probs": None, "entropies": None}
    block = code_block([replace(RESPONSE, **rows, **nothing, prompt="<b>4 + *3*\n```", truth="<i>7", uid="\n<h1>")])
    assert all(line.startswith("    ") for line in block.splitlines())
    rendered = markdown_to_safe_html(block)
    assert set(re.findall(r"</?\w+", rendered)) == {"<pre", "<code", "</code", "</pre"}
    said = (
        "[[    4\n\n]]**no** [[</code></pre><script>x()</script>]][a](javascript:x)\n[[\\u202e\\x00]]# `b` &lt;\n<p>\n"
    )
    assert [text for text in ("<b>4 + *3*\n```", "truth <i>7", said) if text not in html.unescape(rendered)] == []
