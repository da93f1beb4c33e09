"""The best checkpoint is kept apart: verl's own logger and retention, files in place of a model's."""

import json
import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("verl.trainer.ppo.checkpoint_callback")

from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.tracking import Tracking

from oar_plugin.runs.recipe import find_recipe
from tests.recipes.test_recipes import composed


class Trainer:
    """One that saves, validates and logs in verl's order, and keeps two checkpoints as verl does."""

    def __init__(self, folder, resume_mode="auto"):
        trainer = {
            "default_local_dir": str(folder),
            "resume_mode": resume_mode,
            "resume_from_path": None,
            "max_actor_ckpt_to_keep": 2,
            "save_freq": 10,
            "checkpoint_callback_class": composed(find_recipe("qwen2_5_7b_math")).trainer.checkpoint_callback_class,
        }
        self.folder, self.callback = folder, build_checkpoint_callback(OmegaConf.create({"trainer": trainer}))
        self.logger = Tracking("oar", "test", "console")
        self.manager = SimpleNamespace(
            previous_saved_paths=[], remove_previous_save_local_path=lambda paths: [shutil.rmtree(p) for p in paths]
        )

    def step(self, number, accuracy=None, saves=True, async_save=False):
        folder = self.folder / f"global_step_{number}"
        if saves:
            (folder / "actor" / "huggingface").mkdir(parents=True)
            (folder / "actor" / "model.pt").write_text(f"weights {number}")
            (folder / "data.pt").write_text("place")
            BaseCheckpointManager.register_checkpoint(self.manager, str(folder / "actor"), 2)
            self.callback.on_save(trainer=self, global_step=number, checkpoint_dir=str(folder), async_save=async_save)
        metrics = {"actor/loss": 1.0, "val-core/a/acc/best@4/mean": 1.0}
        if accuracy is not None:
            metrics |= {f"val-core/{name}/acc/mean@4": accuracy + more for name, more in (("a", 0.1), ("b", -0.1))}
        self.logger.log(metrics, step=number)

    @property
    def best(self):
        steps = [file.name for file in (self.folder / "best").glob("global_step_*")]
        return steps, json.loads((self.folder / "best" / "best.json").read_text())


def test_the_best_of_the_validated_checkpoints_outlives_verls_own_and_a_restart(tmp_path):
    trainer = Trainer(tmp_path)
    for number, accuracy in ((10, 0.3), (20, 0.6), (30, 0.5), (40, None), (50, 0.4)):
        trainer.step(number, accuracy)
    assert not (tmp_path / "global_step_20" / "actor").exists()  # verl has deleted it
    steps, record = trainer.best
    assert (steps, record["step"], record["accuracy"]) == (["global_step_20"], 20, pytest.approx(0.6))
    assert (tmp_path / "best" / "global_step_20" / "actor" / "model.pt").read_text() == "weights 20"
    again = Trainer(tmp_path)
    again.step(60, 0.55)
    assert again.best[1]["step"] == 20
    again.step(65, 0.9, saves=False)  # validated, and not saved
    assert again.best[1]["step"] == 20
    again.step(70, 0.7)
    assert again.best[0] == ["global_step_70"]


def test_a_restart_leaves_no_checkpoints_behind_and_other_folders_stay(tmp_path):
    """verl deletes those of its own start only."""
    others = ["global_step_5_hf", "global_step_6.bak", "global_step_backup_7"]
    for name in others:
        (tmp_path / name).mkdir()
    for number in (10, 20, 30):
        Trainer(tmp_path).step(number)
    left = {file.name for file in tmp_path.glob("global_step_*")}
    assert left == {"global_step_20", "global_step_30", *others}


def test_files_that_are_still_written_are_not_taken_and_without_links_nothing_is(tmp_path, monkeypatch, caplog):
    trainer = Trainer(tmp_path)
    trainer.step(10, 0.9, async_save=True)
    assert not (tmp_path / "best").exists()

    def refuse(*_):
        raise OSError("no links here")

    with monkeypatch.context() as patch:
        patch.setattr("os.link", refuse)
        trainer.step(20, 0.1)
    assert "no links here" in caplog.text
    assert not list((tmp_path / "best").iterdir())


@pytest.mark.parametrize("damage", ["cut off while it linked", "record"])
def test_a_start_that_was_cut_off_or_a_damaged_record_ends_no_training(tmp_path, damage, caplog):
    trainer = Trainer(tmp_path)
    (tmp_path / "best" / "new" / "actor").mkdir(parents=True)
    (tmp_path / "best" / "new" / "data.pt").write_text("half")
    if damage == "record":
        (tmp_path / "best" / "best.json").write_text("{")
    trainer.step(10, 0.5)
    assert "JSONDecodeError" in caplog.text if damage == "record" else trainer.best[0] == ["global_step_10"]


def test_another_training_in_the_folder_does_not_write_through_the_links(tmp_path):
    Trainer(tmp_path).step(10, 0.9)
    Trainer(tmp_path, resume_mode="disable").step(10, 0.1)
    assert (tmp_path / "best.1" / "global_step_10" / "actor" / "model.pt").read_text() == "weights 10"
    assert Trainer(tmp_path).best[1]["accuracy"] == pytest.approx(0.1)
