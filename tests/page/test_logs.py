"""What verl's own loggers wrote, read back; and logs that are half-written, resumed, missing, or of something else."""

import json
import struct
import sys

import numpy as np
import pandas as pd
import pytest

from oar_plugin.cli.main import main
from oar_plugin.hosts.verl.run_folder import variables
from oar_plugin.page.logs import _wandb_records, read_run

STEPS, METRICS = 12, 250  # a file of wandb then has several blocks


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run's folder, as verl's `Tracking` with the real tensorboard and wandb (offline) leaves it, and what was logged."""
    for package in ("verl", "wandb", "tensorboard"):
        pytest.importorskip(package)
    from verl.utils.tracking import Tracking

    folder = tmp_path_factory.mktemp("logs") / "run"
    rng = np.random.default_rng(0)
    values = pd.DataFrame(
        rng.normal(size=(STEPS, METRICS)), columns=[f"some/metric_{place}" for place in range(METRICS)]
    )
    values.loc[3, "actor/grad_norm"], values.loc[4, "actor/grad_norm"] = np.inf, 1.5
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **variables(folder),
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            "WANDB_SILENT": "1",
        }.items():
            patch.setenv(name, value)
        tracking = Tracking(
            "p", "e", ["file", "tensorboard", "wandb"], {"data": {"seed": 3}, "trainer": {"logger": ["file"]}}
        )
        for step, row in values.iterrows():
            metrics = row.dropna().to_dict()
            if step == 3:
                metrics["actor/grad_norm"] = float("nan")
            tracking.log(metrics, step)
        tracking.finish()
    return folder, values


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        (".", "file"),  # of several the exact one
        ("metrics/start.jsonl", "file"),
        ("tensorboard", "tensorboard"),
        ("tensorboard/events.*", "tensorboard"),
        ("wandb/offline-run-*", "wandb"),
        ("wandb/offline-run-*/*.wandb", "wandb"),
    ],
)
def test_what_each_logger_wrote_is_read_back(logged, place, kind):
    folder, values = logged
    run = read_run(next(folder.glob(place)) if place != "." else folder)
    tolerance = 1e-6 if kind == "tensorboard" else 1e-12  # it keeps 32 bits
    pd.testing.assert_frame_equal(run.metrics, values, check_like=True, check_dtype=False, rtol=tolerance)
    assert (run.kind, run.starts, run.resumed) == (kind, 1, {})
    assert dict(run.settings) == ({"data.seed": 3, "trainer.logger": ["file"]} if kind == "wandb" else {})
    assert run.column("actor/grad_norm").to_dict() == {4: 1.5}


@pytest.mark.parametrize(
    ("place", "name"), [("metrics/start.jsonl", "cut.jsonl"), ("wandb/offline-run-*/*.wandb", "cut.wandb")]
)
def test_a_log_that_was_cut_off_anywhere_is_read_up_to_its_last_whole_step(logged, place, name, tmp_path):
    folder, values = logged
    written = next(folder.glob(place)).read_bytes()
    read = []
    for length in range(len(written) // 5, len(written), len(written) // 7):
        (tmp_path / name).write_bytes(written[:length])
        run = read_run(tmp_path / name)
        read.append(len(run.metrics))
        pd.testing.assert_frame_equal(
            run.metrics, values[: read[-1]].dropna(axis=1, how="all"), check_like=True, check_dtype=False
        )
    assert read == sorted(read)
    assert read[-1] > read[0] > 0


def test_the_end_of_a_block_of_wandbs_that_no_record_fits_into_is_skipped():
    """By hand: the real library leaves such an end once in thousands of blocks."""
    full, after = (struct.pack("<IHB", 0, len(data), 1) + data for data in (b"a" * (32768 - 7 - 7 - 3), b"b"))
    assert list(_wandb_records(b":W&B\xe1\xbe\0" + full + b"\0" * 3 + after)) == [full[7:], b"b"]


def lines(*rows):
    return "".join(json.dumps({"step": step, "data": {"x": value}}) + "\n" for step, value in rows)


@pytest.mark.parametrize(
    ("starts", "values", "resumed"),
    [
        ([[(1, 1), (2, 2)], [(3, 3)]], {1: 1, 2: 2, 3: 3}, {}),
        ([[(1, 1), (2, 2), (3, 3)], [(2, 9)]], {1: 1, 2: 9}, {2: 1}),
        ([[(0, 0), (1, 1), (2, 2), (3, 3)], [(1, 9), (2, 8)], [(2, 7)]], {0: 0, 1: 9, 2: 7}, {1: 2}),
        (
            [[(step, step)] for step in range(12)],
            {step: step for step in range(12)},
            {},
        ),  # start.10 comes after start.9
    ],
)
def test_of_a_step_that_was_done_twice_the_later_counts(starts, values, resumed, tmp_path):
    (tmp_path / "metrics").mkdir()
    for place, rows in enumerate(starts):
        (tmp_path / "metrics" / (f"start.{place}.jsonl" if place else "start.jsonl")).write_text(
            lines(*rows) + '{"step": 9'
        )
    run = read_run(tmp_path)
    assert (run.column("x").to_dict(), run.resumed, run.starts) == (values, resumed, len(starts))


@pytest.mark.parametrize(
    ("place", "hidden", "status", "said"),
    [
        ("nowhere", None, 2, "nowhere: No such file or directory"),
        ("empty", None, 2, "empty: no logs of verl, looked for metrics/start*.jsonl"),
        ("rollouts.jsonl", None, 2, "rollouts.jsonl: no step in it"),
        ("empty.wandb", None, 2, "empty.wandb: no step in it"),
        ("broken", None, 2, "run.yaml: not what a run writes (KeyError)"),
        ("empty.wandb", "wandb", 1, "wandb is not installed here; pip install wandb"),
        ("events.out.tfevents.1", "tensorboard", 1, "tensorboard is not installed here; pip install tensorboard"),
        ("metrics.jsonl", "matplotlib", 1, "matplotlib is not installed here; pip install matplotlib"),
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
    assert main(["report", place]) == status
    error = capsys.readouterr().err
    assert said in error
    assert (error.startswith("oar report: "), error.count("\n")) == (True, 1)
