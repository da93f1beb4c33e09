"""`oar inspect` on what a run dumps."""

import pytest
import torch

from oar_plugin.cli.main import main
from oar_plugin.hosts.verl.dump import ResponseDump


@pytest.fixture
def folder(tmp_path):
    dump = ResponseDump(str(tmp_path / "dump"), per_step=2)
    for step in (1, 2):
        dump.write(
            step=step,
            uid=f"u{step}",
            prompt="1+1?",
            tokens=["so ", "<b>", "#### ", "2"],
            segments=torch.tensor([1, 1, 2, 3], dtype=torch.int8),
            importance=torch.tensor([0.5, 2.0, 0.0, 0.0]),
            weights=torch.tensor([0.4, 1.6, 1.0, 1.0]),
            advantage=torch.tensor([1.0, 1.0, 1.0, 1.0]),
            reward=1.0,
            status="scored",
        )
    return tmp_path / "dump"


def test_a_page_is_written(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    page = (folder / "tokens.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.split("<body>")[1].replace("<b>OAR", "")
    assert "2 responses of steps 1, 2" in capsys.readouterr().out


def test_steps_can_be_chosen(folder, tmp_path, capsys):
    assert main(["inspect", str(folder), "--steps", "2", "--out", str(tmp_path / "page.html")]) == 0
    assert "1 responses of steps 2" in capsys.readouterr().out


def test_a_step_that_was_not_dumped_is_named(folder, capsys):
    assert main(["inspect", str(folder), "--steps", "7"]) == 2
    assert "[7]" in capsys.readouterr().err


def test_an_empty_folder_says_what_to_set(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "algorithm.oar.dump_dir" in capsys.readouterr().err


def test_scored_responses_are_dumped_first():
    import tempfile

    dump = ResponseDump(tempfile.mkdtemp(), per_step=2)
    scored = torch.tensor([False, True, False, True])
    needed = torch.tensor([True, True, False, True])
    assert dump.choose(scored, needed) == [1, 3]
    assert dump.choose(torch.zeros(4, dtype=torch.bool), needed) == [0, 1]
