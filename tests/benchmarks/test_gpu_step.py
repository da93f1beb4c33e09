"""Pieces of a step on a GPU: the rehearsal on a CPU, and what a run leaves that is cut off, or out of memory or time."""

import json
import sys

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu_step import CACHED, PIECES, WHOLE
from oar_plugin.passes.plain import PlainHost
from tests.processes import run

ABSENT = "import sys; sys.modules.update(dict.fromkeys(('verl', 'tyro', 'matplotlib', 'PIL', 'pandas', 'tensordict')))"


def out_of_memory(*_):
    raise torch.OutOfMemoryError("out of memory: a line\nmore")


def test_a_cut_off_run_goes_on_and_a_piece_that_fails_stops_no_other(tmp_path, monkeypatch):
    def plain(*words):
        """The exit status of the plain part, and by piece what the page says behind its name."""
        monkeypatch.setattr(sys, "argv", ["gpu_step", "plain", str(tmp_path), "--tiny", *words])
        status, page = gpu_step.main(), (tmp_path / "gpu_step.md").read_text()
        assert "verl is not installed" in page
        return status, {row.split(" | ")[2]: row.split(" | ")[3] for row in page.splitlines() if "| tiny |" in row}

    monkeypatch.setattr(gpu_step, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_step, "TINY", gpu_step.TINY[:1])
    with monkeypatch.context() as patched:
        patched.setattr(PlainHost, "copies", out_of_memory)
        status, first = plain()
    assert status == 1
    assert [name for name in PIECES if first[name] == "OutOfMemoryError: out of memory: a line"] == [WHOLE, CACHED]
    file = tmp_path / "pieces.jsonl"
    file.write_text(cut := file.read_text()[:-9])  # the line of oar_g
    assert (plain("--until", "0")[0], file.read_text()) == (0, cut), "no piece begins"
    status, then = plain()
    assert status == 0 < min(float(then[name]) for name in PIECES)
    assert then["fisher"] == first["fisher"], "what was measured is kept"


@pytest.mark.slow
def test_both_parts_are_rehearsed(tmp_path):
    pytest.importorskip("verl")
    script = ["bash", "benchmarks/gpu_step.sh", str(tmp_path), "--tiny"]
    start = "import os, sys; os.execvp('bash', sys.argv[1:])"
    run(["-c", start, *script], tmp_path / "log", 300, PYTHON=sys.executable)
    added = {}
    for part, rows in zip(
        gpu_step.CASES, json.loads((tmp_path / "gpu_step.json").read_text())["tables"].values(), strict=True
    ):
        assert [row["piece"] for row in rows if float(row["s"]) > 0 < float(row["TFLOP"])] == [*PIECES] * 2
        added[part] = {row["piece"]: float(row["added FLOPs / theirs"] or 0) for row in rows}
    assert added["plain"]["fisher, 1 in 8"] == pytest.approx(added["plain"]["fisher"] / 8, rel=0.02)
    assert added["engine"]["fisher"] < 0.8 * added["plain"]["fisher"], "its forward is that of log-probs"
    run(["-c", f"{ABSENT}; import benchmarks.gpu_step"], tmp_path / "log", 100)
