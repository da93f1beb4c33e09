"""Keeps the checkpoint with the best validation, which verl deletes with the oldest: `trainer.checkpoint_callback_class`.

verl tells its callback of each save (0.9.1 and newer). From then on the callback also reads the metrics, as one more logger of
the run: a validation that belongs to the step that was just saved, and beats all before it, has the checkpoint's files linked
into `best/global_step_N` beside it. Links cost no disk until verl deletes its own; where the file system has none, files are
copied. It works for every estimator, and acts only in runs that name it.
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

logger = logging.getLogger("oar_plugin")

FOLDER, RECORD = "best", "best.json"


class KeepBest(CheckpointCallback):
    """The mean over the validation sets of verl's `val-core/SET/acc/mean@K` (or `reward`) decides."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._folder = Path(config.trainer.default_local_dir)
        self._saved: Path | None = None

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        self._saved = (
            None if async_save else Path(checkpoint_dir)
        )  # files that are still being written cannot be linked
        trainer.logger.logger["oar_best_checkpoint"] = self
        self._forget_older_tries(global_step)

    def log(self, data: dict[str, Any], step: int) -> None:
        """As verl's loggers have it: the metrics of a step."""
        scores = [float(value) for key, value in data.items() if key.startswith("val-core/") and "/mean@" in key]
        if not scores or self._saved is None or self._saved.name != f"global_step_{step}":
            return
        accuracy, record = sum(scores) / len(scores), self._folder / FOLDER / RECORD
        before = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
        if before is not None and before["accuracy"] >= accuracy:
            return
        try:
            shutil.copytree(self._saved, record.parent / self._saved.name, copy_function=_link, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:  # training matters more
            logger.warning("the best checkpoint, %s, could not be kept apart: %s", self._saved, error)
            return
        fresh = record.with_suffix(".new")
        fresh.write_text(json.dumps({"step": step, "accuracy": accuracy}), encoding="utf-8")
        fresh.replace(record)
        for old in record.parent.glob("global_step_*"):
            if old.name != self._saved.name:
                shutil.rmtree(old, ignore_errors=True)

    def _forget_older_tries(self, step: int) -> None:
        """verl counts the checkpoints that it keeps from each start on: those of the tries before would stay for good."""
        kept = self.config.trainer.max_actor_ckpt_to_keep
        steps = {int(file.name.split("_")[-1]): file for file in self._folder.glob("global_step_*")}
        older = sorted(number for number in steps if number <= step)
        for number in older[: -max(2, kept)] if kept else []:
            shutil.rmtree(steps[number], ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
