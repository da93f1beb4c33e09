"""A few responses of every step with their weights, for people to look at (`oar inspect`)."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


class ResponseDump:
    """Writes `<folder>/step_<step>.jsonl`, a line each for so many responses of a step.

    A step that is run again, after a resume, replaces its file. A file is there as a whole or not at all.
    """

    def __init__(self, folder: Path, per_step: int) -> None:
        self.folder = folder.absolute()
        self.per_step = per_step
        self.folder.mkdir(parents=True, exist_ok=True)
        self._step: int | None = None
        self._lines: list[str] = []

    def choose(self, step: int, scored_B: Tensor, needed_B: Tensor) -> list[int]:
        """Rows to write: scored ones first, then those that fell back; of a step's second batch what the first one left."""
        if step != self._step:
            self._step, self._lines = step, []
        order = scored_B.nonzero()[:, 0].tolist() + (needed_B & ~scored_B).nonzero()[:, 0].tolist()
        return order[: self.per_step - len(self._lines)]

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write responses of the step that `choose` was asked for; tensors become lists."""
        for row in rows:
            plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in row.items()}
            self._lines.append(json.dumps({"step": self._step, **plain}) + "\n")
        file = self.folder / f"step_{self._step:06d}.jsonl"
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text("".join(self._lines), encoding="utf-8")
        os.replace(unfinished, file)
