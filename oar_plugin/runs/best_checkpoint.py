"""Keeps the checkpoint with the best validation, which verl would delete in its turn: `trainer.checkpoint_callback_class`.

verl 0.9.1 and newer call it at each save. It then reads the metrics as one more logger of the run. When the step that was just
saved has the best validation so far, it links the checkpoint's files into `best/global_step_N`. Links cost no time, and no disk
until verl deletes its own files; a file system without links keeps no best checkpoint. An error in here never ends a run.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from oar_plugin.output import write_whole
from oar_plugin.runs.run_folder import mean_accuracy, unused

logger = logging.getLogger("oar_plugin")

FOLDER, RECORD = "best", "best.json"


class KeepBest(CheckpointCallback):
    """Compares checkpoints by `mean_accuracy`, the mean over the validation sets."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._folder = Path(config.trainer.default_local_dir)
        self._best = self._folder / FOLDER
        self._saved: Path | None = None
        if config.trainer.resume_mode != "auto" and config.trainer.save_freq > 0:
            self._guarded(self._put_aside)

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        # An asynchronous save is still writing its files: they are not linked.
        self._saved = None if async_save else Path(checkpoint_dir)
        trainer.logger.logger["oar_best_checkpoint"] = self
        self._guarded(self._delete_those_of_earlier_starts, global_step)

    def log(self, data: dict[str, Any], step: int) -> None:
        """Take the metrics of a step, like every logger of verl."""
        accuracy = mean_accuracy(data)
        if accuracy is not None and self._saved is not None and self._saved.name == f"global_step_{step}":
            self._guarded(self._keep, self._saved, step, accuracy)

    def _guarded(self, function: Any, *arguments: Any) -> None:
        """Log an error: verl would end training with it."""
        try:
            function(*arguments)
        except Exception as error:
            logger.warning("the best checkpoint in %s: %s: %s", self._best, type(error).__name__, error)

    def _keep(self, saved: Path, step: int, accuracy: float) -> None:
        record, new = self._best / RECORD, self._best / "new"
        if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["accuracy"] >= accuracy:
            return
        shutil.rmtree(new, ignore_errors=True)  # left by a start that was cut off here
        try:
            shutil.copytree(saved, new, copy_function=os.link)
        except (OSError, shutil.Error):
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(self._best / saved.name, ignore_errors=True)
        new.rename(self._best / saved.name)
        write_whole(record, json.dumps({"step": step, "accuracy": accuracy}))
        for number, old in _steps(self._best).items():
            if number != step:
                shutil.rmtree(old, ignore_errors=True)

    def _put_aside(self) -> None:
        """Rename the best of an earlier training in this folder, and remove verl's checkpoint that shares its files.

        verl would write over these files.
        """
        for name in [path.name for path in _steps(self._best).values()]:
            if str(self.config.trainer.resume_from_path or "").rstrip("/").split("/")[-1] != name:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        if self._best.exists():
            self._best.rename(unused(self._best))

    def _delete_those_of_earlier_starts(self, step: int) -> None:
        """Remove the checkpoints of earlier starts: verl only counts and deletes those of its own start."""
        kept = self.config.trainer.max_actor_ckpt_to_keep
        older = sorted(item for item in _steps(self._folder).items() if item[0] <= step)
        for _, folder in older[: -max(2, kept)] if kept else []:
            shutil.rmtree(folder, ignore_errors=True)


def _steps(folder: Path) -> dict[int, Path]:
    """Return `step -> folder` of verl's checkpoints, without other folders of similar names."""
    matches = {re.fullmatch(r"global_step_(\d+)", path.name): path for path in folder.glob("global_step_*")}
    return {int(match[1]): path for match, path in matches.items() if match}
