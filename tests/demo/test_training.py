"""The demo's run of verl, short of running it."""

import json
import subprocess

import pytest

pytest.importorskip("psutil")
pytest.importorskip("transformers")

from oar_plugin.cli.main import main
from recipes.cpu_demo import main as demo
from recipes.cpu_demo.training import STAGES, Run, TrainingView, diagnose, read_metrics


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    return Run(folder, "oar", tmp_path / "model", tmp_path / "train.parquet", tmp_path / "val.parquet", steps=4, seed=3)


def metrics_line(step, reward):
    return json.dumps({"step": step, "data": {"critic/score/mean": reward, "timing_s/step": 1.5}}) + "\n"


def test_methods_differ_in_nothing_but_the_estimator(run, tmp_path):
    grpo = Run(run.folder, "grpo", run.model, run.train_file, run.validation_file, run.steps, run.seed)
    only_oar = set(run.overrides()) - set(grpo.overrides())
    assert all(override.startswith("algorithm.") for override in only_oar)
    assert set(grpo.overrides()) - set(run.overrides()) == {"algorithm.adv_estimator=grpo"}


def test_no_override_is_given_twice(run):
    keys = [override.split("=")[0].lstrip("+") for override in run.arguments()]
    repeated = {key for key in keys if keys.count(key) > 1}
    assert repeated <= {"actor_rollout_ref.rollout.max_num_seqs"}


def test_hydra_reads_the_paths_as_they_are(tmp_path):
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    folder = tmp_path / "it's (my) folder, {x}=1"
    run = Run(folder, "oar", folder / "model", folder / "train", folder / "val", steps=4, seed=3)
    found = {override.key_or_group: override.value() for override in parser.parse_overrides(run.overrides())}
    assert found["actor_rollout_ref.model.path"] == str(folder / "model")
    assert found["trainer.default_local_dir"] == str(folder / "checkpoint")
    assert found["algorithm.oar.dump_dir"] == str(folder / "token_weights")


def test_the_command_is_a_script_that_a_shell_accepts(run, tmp_path):
    script = tmp_path / "command.sh"
    script.write_text(run.script())
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "algorithm.adv_estimator=oar" in script.read_text()
    assert f"VERL_FILE_LOGGER_PATH='{run.metrics_file}'" in script.read_text()


def test_metrics_leave_out_a_half_written_line(run):
    assert read_metrics(run.metrics_file) == []
    run.metrics_file.write_text(metrics_line(1, 0.25) + metrics_line(2, 0.5) + '{"step": 3, "da')
    assert [(row["step"], row["critic/score/mean"]) for row in read_metrics(run.metrics_file)] == [(1, 0.25), (2, 0.5)]


def test_the_view_says_what_is_awaited_and_then_how_far_it_is(run):
    view = TrainingView(run)
    assert STAGES[0][1] in view.status()
    view.on_line("noise")
    view.on_line(f"(TaskRunner) {STAGES[2][0]} noise")
    assert f"4/{len(STAGES)}" in view.status()
    run.metrics_file.write_text(metrics_line(1, 0.25) + metrics_line(2, 0.75))
    view._looked_at = 0.0
    assert view.status() == "step 2/4   reward 0.50   1.5 s a step   0:03 left"


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("OSError: No space left on device", "--out"),
        ("ray.exceptions.OutOfMemoryError", "memory"),
        ("x\nValueError: what happened\ny", "ValueError: what happened"),
        ("", "before its last step"),
    ],
)
def test_a_failed_run_is_explained_in_one_line(tmp_path, log, advice):
    path = tmp_path / "verl.log"
    path.write_text(log)
    assert advice in diagnose(path)
    assert "\n" not in diagnose(path)


class TestCommand:
    def test_too_little_memory_is_one_line_that_says_what_to_do(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(demo, "NEEDED_GB", 1e6)
        assert main(["demo", "--out", str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "close other programs" in error or "run.sh" in error

    def test_two_starts_do_not_share_a_folder(self, tmp_path):
        assert demo._new_folder(tmp_path) != demo._new_folder(tmp_path)

    def test_an_unwritable_place_is_one_line(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(demo, "_obstacle", lambda: None)
        file = tmp_path / "file"
        file.touch()
        assert main(["demo", "--out", str(file)]) == 1
        assert "--out" in capsys.readouterr().err

    @pytest.mark.parametrize("steps", ["0", "-3", "many"])
    def test_steps_must_be_positive(self, steps, capsys):
        with pytest.raises(SystemExit):
            main(["demo", "--steps", steps])
        assert "--steps" in capsys.readouterr().err
