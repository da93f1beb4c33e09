import pytest

from benchmarks.learning.measure import Record
from oar_plugin.cli.main import main


def test_command_offers_every_task_and_method(capsys):
    from benchmarks.learning.credit import METHODS
    from benchmarks.tiny.tasks import TASKS

    with pytest.raises(SystemExit):
        main(["bench", "learning", "--help"])
    words = set(capsys.readouterr().out.replace(",", " ").replace(";", " ").replace("{", " ").replace("}", " ").split())
    assert set(METHODS) <= words
    assert words & set(TASKS) == set(TASKS) - {"lookup", "tracking"}  # too hard for a warm start of two minutes


def test_unknown_method_is_said_before_anything_is_trained(tmp_path, capsys):
    assert main(["bench", "learning", "--methods", "magic", "--results", str(tmp_path / "runs")]) == 2
    assert "magic" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_study_and_report(tmp_path, monkeypatch, capsys):
    from benchmarks.learning import measure as learning

    def train(run, model):
        steps = [
            {
                "reward": 0.1 * run.seed + (run.method == "oracle") * (0.2 + 0.001 * run.seed),
                "sample_seconds": 1.0,
                "update_seconds": 1.0,
            }
        ]
        return Record(run, steps * run.steps, {0: 0.1, run.steps: 0.2}, 1.0, 0.0)

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learning, "learned_model", lambda *_: None)
    arguments = ["--methods", "grpo", "oracle", "--seeds", "2", "--steps", "3", "--warm-starts", "2"]
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main(["bench", "learning", *arguments, *folders]) == 0
    assert len(list((tmp_path / "runs").glob("*.json"))) == 4
    assert "+0.201" in (tmp_path / "out" / "learning_cpu.md").read_text()
    listed = ["bench", "learning", "--variants", "--steps", "3", *folders]
    assert main(listed) == 0
    assert (
        "| parallel | 0.0006 | oracle | 2 | 0.251 | +0.201 |" in (tmp_path / "out" / "learning_variants.md").read_text()
    )
    assert main([*listed, "--steps", "4"]) == 2
    assert "2 warm start(s)" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--warm-starts", "0"], ["--copies", "1"]])
def test_numbers_that_cannot_be(wrong, tmp_path, capsys):
    assert main(["bench", "learning", *wrong, "--results", str(tmp_path)]) == 2
    assert "at least" in " ".join(capsys.readouterr().err.split())


def test_alignment_trains_nothing(tmp_path, monkeypatch, capsys):
    from benchmarks.learning import alignment as learning_alignment
    from benchmarks.learning import measure as learning
    from benchmarks.learning.alignment import Alignment

    def align(runs, model, reference_batches, batches, progress):
        assert (model, reference_batches, batches) == ("model", 10, 2)
        return [Alignment(run, 0.5, 0.2 + place / 10, place / 10, 0.01) for place, run in enumerate(runs)]

    monkeypatch.setattr(learning_alignment, "align", align)
    monkeypatch.setattr(learning, "after_grpo", lambda run, steps, cache: "model")
    monkeypatch.setattr(learning, "study", lambda *_: pytest.fail("trained"))
    arguments = ["bench", "learning", "--methods", "grpo", "onward", "--alignment", "2", "--lr", "1e-3", "2e-3"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "+0.1000 ± 0.0100" in shown
    assert shown.count("onward") == 1
    assert main(["bench", "learning", "--alignment", "1", "--results", str(tmp_path)]) == 2


def test_nothing_finished_is_said(tmp_path, capsys):
    assert main(["bench", "learning", "--finished", "--results", str(tmp_path)]) == 2
    assert "leave --finished out" in " ".join(capsys.readouterr().err.split())
