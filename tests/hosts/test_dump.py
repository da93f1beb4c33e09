"""Files of dumped responses: each step once, each file as a whole."""

import json
import os

import pytest
import torch

from oar_plugin.hosts.verl.dump import ResponseDump

SCORED, NEEDED = torch.tensor([0, 1, 0, 1]).bool(), torch.tensor([1, 1, 0, 1]).bool()


def dump(folder, step, per_step=2, batches=1):
    """As one process of a run does; returns the lines of the step's file."""
    one = ResponseDump(folder, per_step)
    for batch in range(batches):
        rows = one.choose(step, SCORED, NEEDED)
        one.write({"uid": f"{batch}_{row}", "weights": torch.ones(2)} for row in rows)
    return [json.loads(line) for line in (folder / f"step_{step:06d}.jsonl").read_text().splitlines()]


def test_scored_rows_come_first_and_then_those_that_fell_back(tmp_path):
    assert [line["uid"] for line in dump(tmp_path / "new" / "folder", step=3, per_step=5)] == ["0_1", "0_3", "0_0"]


def test_a_step_that_is_run_again_is_written_anew(tmp_path):
    first = dump(tmp_path, step=3)
    assert dump(tmp_path, step=3) == first == [{"step": 3, "uid": f"0_{row}", "weights": [1.0, 1.0]} for row in (1, 3)]


def test_the_batches_of_one_step_share_its_file_and_its_number(tmp_path):
    """`parameter_sync_step` of verl's separate trainer."""
    assert [line["uid"] for line in dump(tmp_path, step=3, per_step=4, batches=2)] == ["0_1", "0_3", "0_0", "1_1"]


def test_each_step_has_a_file_of_its_own(tmp_path):
    one = ResponseDump(tmp_path, 1)
    for step in (1, 2):
        one.write({"uid": row} for row in one.choose(step, SCORED, NEEDED))
    assert [path.read_text().count("\n") for path in sorted(tmp_path.glob("step_*.jsonl"))] == [1, 1]


def test_a_crash_leaves_no_half_file(tmp_path, monkeypatch):
    before = dump(tmp_path, step=3)

    def crash(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    for step in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            dump(tmp_path, step=step)
    (file,) = tmp_path.glob("step_*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == before
