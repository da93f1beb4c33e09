"""What verl's own loggers wrote, read back; and logs that are half-written, resumed, missing, or of something else."""

import json
import struct

import numpy as np
import pandas as pd
import pytest

from oar_plugin.runs.report.logs import _wandb_records, read_run
from oar_plugin.runs.run_folder import variables

STEPS, METRICS = 12, 250  # a file of wandb then has several blocks


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run's folder, as verl's `Tracking` with the real tensorboard and wandb (offline) leaves it, and what was logged."""
    for package in ("verl", "tensorboard"):
        pytest.importorskip(package)
    pytest.importorskip("wandb").teardown()  # the folder of another test's run stays for the life of a process
    from verl.utils.tracking import Tracking

    folder = tmp_path_factory.mktemp("logs") / "run"
    rng = np.random.default_rng(0)
    names = [f"some/metric_{place}" for place in range(METRICS)]
    values = pd.DataFrame(rng.normal(size=(STEPS, METRICS)), columns=names)
    values.loc[3, "actor/grad_norm"], values.loc[4, "actor/grad_norm"] = np.inf, 1.5
    with pytest.MonkeyPatch.context() as patch:
        offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "1"}
        for name, value in {**variables(folder), **offline}.items():
            patch.setenv(name, value)
        config = {"data": {"seed": 3}, "trainer": {"logger": ["file"]}}
        tracking = Tracking("p", "e", ["file", "tensorboard", "wandb"], config)
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
    assert {*run.metrics} == {*values}
    pd.testing.assert_frame_equal(run.metrics[[*values]], values, check_dtype=False, rtol=tolerance)
    assert (run.kind, run.starts, run.resumed) == (kind, 1, {})
    assert dict(run.settings) == ({"data.seed": 3, "trainer.logger": ["file"]} if kind == "wandb" else {})
    assert run.column("actor/grad_norm").to_dict() == {4: 1.5}


@pytest.mark.parametrize("after", [b"", b"\xff" * 40_000])
@pytest.mark.parametrize("place", ["metrics/start.jsonl", "wandb/offline-run-*/*.wandb"])
def test_a_log_that_is_cut_off_or_broken_is_read_up_to_its_last_whole_step(logged, place, after, tmp_path):
    folder, values = logged
    file = next(folder.glob(place))
    written, name, read = file.read_bytes(), f"cut{file.suffix}", []
    for length in range(len(written) // 5, len(written), len(written) // 7):
        (tmp_path / name).write_bytes(written[:length] + after)
        run = read_run(tmp_path / name)
        read.append(len(run.metrics))
        whole = values[: read[-1]].dropna(axis=1, how="all")
        pd.testing.assert_frame_equal(run.metrics, whole, check_like=True, check_dtype=False)
    assert read == sorted(read)
    assert read[-1] > read[0] > 0


def test_the_end_of_a_block_of_wandbs_that_no_record_fits_into_is_skipped():
    """By hand: the real library leaves such an end once in thousands of blocks."""
    full, after = (struct.pack("<IHB", 0, len(data), 1) + data for data in (b"a" * (32768 - 7 - 7 - 3), b"b"))
    assert list(_wandb_records(b":W&B\xe1\xbe\0" + full + b"\0" * 3 + after)) == [full[7:], b"b"]


def run_of(folder, starts):
    """A run of starts, each with (step, metrics) pairs and a line that was cut off."""
    (folder / "metrics").mkdir()
    for place, rows in enumerate(starts):
        text = "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in rows)
        (folder / "metrics" / (f"start.{place}.jsonl" if place else "start.jsonl")).write_text(text + '{"step": 9')
    return read_run(folder)


@pytest.mark.parametrize(
    ("starts", "values", "resumed"),
    [
        ([[(1, 1), (2, 2)], [(3, 3)]], {1: 1, 2: 2, 3: 3}, {}),
        ([[(1, 1), (2, 2), (3, 3)], [(2, 9)]], {1: 1, 2: 9}, {2: 2}),
        ([[(1, 1), (2, 2)], [(2, 9)]], {1: 1, 2: 9}, {2: 1}),
        ([[(0, 0), (1, 1), (2, 2), (3, 3)], [(1, 9), (2, 8)], [(2, 7)]], {0: 0, 1: 9, 2: 7}, {1: 3, 2: 1}),
        # start.10 comes after start.9.
        ([[(step, step)] for step in range(12)], {step: step for step in range(12)}, {}),
    ],
)
def test_of_a_step_that_was_done_twice_the_later_counts(starts, values, resumed, tmp_path):
    run = run_of(tmp_path, [[(step, {"x": value}) for step, value in rows] for rows in starts])
    assert (run.column("x").to_dict(), run.resumed, run.starts) == (values, resumed, len(starts))


def test_a_step_that_was_done_again_keeps_nothing_and_one_that_is_only_validated_again_keeps_all(tmp_path):
    first = [(1, {"x": 1}), (2, {"x": 2, "y": 2}), (3, {"x": 3, "y": 3})]
    second = [(2, {"val-core/a": 0.5}), (3, {"x": 9})]
    run = run_of(tmp_path, [first, second])
    read = [row.dropna().to_dict() for _, row in run.metrics.iterrows()]
    assert read == [{"x": 1}, {"x": 2, "y": 2, "val-core/a": 0.5}, {"x": 9}]
    assert run.resumed == {3: 1}


@pytest.mark.parametrize(("value", "read"), [("true", 1), ("null", np.inf), ("NaN", np.inf), ("1" * 400, np.inf)])
def test_values_of_any_kind_are_numbers_and_lines_of_none_are_left_out(value, read, tmp_path):
    file = tmp_path / "a.jsonl"
    broken = ['{"step": Infinity, "data": {"x": 1}}', '{"step": 2, "data": {"x": "a"}}', "[" * 100_000]
    file.write_text("\n".join([f'{{"step": 1, "data": {{"x": {value}}}}}', *broken]))
    assert read_run(file).metrics["x"].to_dict() == {1: read, 2: pytest.approx(np.nan, nan_ok=True)}


def test_settings_of_an_older_run_have_todays_module_names(tmp_path):
    """Else a comparison with a newer run would list them as differences."""
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "start.jsonl").write_text('{"step": 1, "data": {"a": 1.0}}\n')
    record = "state: finished\nsettings: {reward.path: 'pkg://oar_plugin.hosts.verl.reward', seed: 1}\n"
    (tmp_path / "run.yaml").write_text(record)
    assert read_run(tmp_path).settings == {"reward.path": "pkg://oar_plugin.runs.reward", "seed": 1}
