"""Keeps the checkpoint with the best validation accuracy: a class for verl's `trainer.checkpoint_callback_class`.

verl deletes old checkpoints, even the best one. verl 0.9.1 and newer call this class at each save. If the saved step has the
best accuracy so far, the class hard-links the checkpoint's files into `best/global_step_N`. Links take no time, and no disk
space until verl deletes its own files. Errors, such as a file system without hard links, are logged and never end a run.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from oar_plugin.output import logger, write_whole
from oar_plugin.runs.run_folder import free_path


class KeepBest(CheckpointCallback):
    """Compares checkpoints by the mean over the validation sets of verl's `val-core/SET/acc/mean@K` (or `reward/mean@K`)."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._folder = Path(config.trainer.default_local_dir)
        self._best = self._folder / "best"
        self._saved: Path | None = None
        if config.trainer.resume_mode != "auto" and config.trainer.save_freq > 0 and not config.trainer.get("val_only"):
            self._guarded(self._put_aside)

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        # An asynchronous save is still writing its files, so they are not linked.
        self._saved = None if async_save else Path(checkpoint_dir)
        trainer.logger.logger["oar_best_checkpoint"] = self  # to receive the metrics
        self._guarded(self._delete_old, global_step)

    def log(self, data: dict[str, Any], step: int) -> None:
        sets = [float(value) for name, value in data.items() if name.startswith("val-core/") and "/mean@" in name]
        if sets and self._saved is not None and self._saved.name == f"global_step_{step}":
            self._guarded(self._keep, self._saved, step, sum(sets) / len(sets))

    def _guarded(self, function: Any, *arguments: Any) -> None:
        """Call `function` and log its errors. A raised error would end training."""
        try:
            function(*arguments)
        except Exception as error:
            logger.warning("the best checkpoint in %s: %s: %s", self._best, type(error).__name__, error)

    def _keep(self, saved: Path, step: int, accuracy: float) -> None:
        record, new, kept = self._best / "best.json", self._best / "new", self._best / saved.name
        if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["accuracy"] >= accuracy:
            return
        shutil.rmtree(new, ignore_errors=True)  # exists if an earlier process was killed at this point
        try:
            shutil.copytree(saved, new, copy_function=os.link)
            shutil.rmtree(kept, ignore_errors=True)
            new.rename(kept)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        write_whole(record, json.dumps({"step": step, "accuracy": accuracy}))
        for old in set(_steps(self._best).values()) - {kept}:
            shutil.rmtree(old, ignore_errors=True)

    def _put_aside(self) -> None:
        """Rename `best`, which earlier training in this folder wrote, and delete verl's checkpoint that shares its files.

        verl would overwrite the shared files. A checkpoint from which this run resumes is not deleted.
        """
        for name in [path.name for path in _steps(self._best).values()]:
            if str(self.config.trainer.resume_from_path or "").rstrip("/").split("/")[-1] != name:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        if self._best.exists():
            self._best.rename(free_path(self._best))

    def _delete_old(self, step: int) -> None:
        """Keep the newest `max_actor_ckpt_to_keep` checkpoints (at least 2) up to `step`, and delete older ones.

        verl itself deletes only checkpoints that it has saved since its last start.
        """
        kept = self.config.trainer.max_actor_ckpt_to_keep
        older = sorted(item for item in _steps(self._folder).items() if item[0] <= step)
        for _, folder in older[: -max(2, kept)] if kept else []:
            shutil.rmtree(folder, ignore_errors=True)


def _steps(folder: Path) -> dict[int, Path]:
    """Return `step -> folder` for verl's checkpoints in a folder; folders with similar names are ignored."""
    return {int(path.name[12:]): path for path in folder.glob("global_step_*") if path.name[12:].isdecimal()}
