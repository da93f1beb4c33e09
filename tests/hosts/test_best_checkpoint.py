"""The best checkpoint is kept apart: verl's own logger and retention, files in place of a model's."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl.trainer.ppo.checkpoint_callback")

from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.tracking import Tracking

from oar_plugin.launch.schedule import KEEP_BEST


class Trainer:
    """One that saves, validates and logs in verl's order, and keeps two checkpoints as verl does."""

    def __init__(self, folder):
        trainer = {
            "default_local_dir": str(folder),
            "max_actor_ckpt_to_keep": 2,
            "checkpoint_callback_class": KEEP_BEST,
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


def test_a_restart_leaves_no_checkpoints_behind(tmp_path):
    """verl deletes those of its own start only."""
    Trainer(tmp_path).step(10), Trainer(tmp_path).step(20)
    again = Trainer(tmp_path)
    again.step(30)
    assert sorted(file.name for file in tmp_path.glob("global_step_*")) == ["global_step_20", "global_step_30"]


def test_files_that_are_still_written_are_not_taken_and_without_links_they_are_copied(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    trainer.step(10, 0.9, async_save=True)
    assert not (tmp_path / "best").exists()

    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    trainer.step(20, 0.1)
    assert Path(tmp_path / "best" / "global_step_20" / "data.pt").read_text() == "place"
