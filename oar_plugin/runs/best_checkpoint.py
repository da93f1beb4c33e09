"""Keeps the checkpoint with the best validation, which verl deletes with the oldest: `trainer.checkpoint_callback_class`.

verl tells its callback of each save (0.9.1 and newer). From then on the callback also reads the metrics, as one more logger of
the run: a validation that belongs to the step that was just saved, and beats all before it, has the checkpoint's files linked
into `best/global_step_N` beside it. Links cost no time, and no disk until verl deletes its own; where the file system has none,
the best checkpoint is not kept. It works for every estimator, acts only in runs that name it, and never ends one.
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
    """The mean over the validation sets of verl's `val-core/SET/acc/mean@K` (or `reward`) decides."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._folder = Path(config.trainer.default_local_dir)
        self._best = self._folder / FOLDER
        self._saved: Path | None = None
        if config.trainer.resume_mode != "auto":
            self._guarded(self._put_aside)

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        # Files that are still being written are not linked.
        self._saved = None if async_save else Path(checkpoint_dir)
        trainer.logger.logger["oar_best_checkpoint"] = self
        self._guarded(self._delete_those_of_earlier_starts, global_step)

    def log(self, data: dict[str, Any], step: int) -> None:
        """As verl's loggers have it: the metrics of a step."""
        accuracy = mean_accuracy(data)
        if accuracy is not None and self._saved is not None and self._saved.name == f"global_step_{step}":
            self._guarded(self._keep, self._saved, step, accuracy)

    def _guarded(self, function: Any, *arguments: Any) -> None:
        """verl would end training with what a callback raises."""
        try:
            function(*arguments)
        except Exception as error:
            logger.warning("the best checkpoint in %s: %s: %s", self._best, type(error).__name__, error)

    def _keep(self, saved: Path, step: int, accuracy: float) -> None:
        record, new = self._best / RECORD, self._best / "new"
        if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["accuracy"] >= accuracy:
            return
        shutil.rmtree(new, ignore_errors=True)  # a start that was cut off here
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
        """Another training begins in this folder: verl would write over files that the best of the last one shares."""
        for name in [path.name for path in _steps(self._best).values()]:
            if str(self.config.trainer.resume_from_path or "").rstrip("/").split("/")[-1] != name:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        if self._best.exists():
            self._best.rename(unused(self._best))

    def _delete_those_of_earlier_starts(self, step: int) -> None:
        """verl counts the checkpoints that it keeps from each start on: those of the starts before would stay for good."""
        kept = self.config.trainer.max_actor_ckpt_to_keep
        older = sorted(item for item in _steps(self._folder).items() if item[0] <= step)
        for _, folder in older[: -max(2, kept)] if kept else []:
            shutil.rmtree(folder, ignore_errors=True)


def _steps(folder: Path) -> dict[int, Path]:
    """verl's checkpoints in a folder, and nothing that somebody put beside them."""
    found = {re.fullmatch(r"global_step_(\d+)", path.name): path for path in folder.glob("global_step_*")}
    return {int(match[1]): path for match, path in found.items() if match}
