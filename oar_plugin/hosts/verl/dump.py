"""A few responses of every step with their weights, for people to look at (`oar inspect`)."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor


class ResponseDump:
    """Appends JSON lines to `<folder>/step_<step>.jsonl`, of so many responses a step."""

    def __init__(self, folder: str, per_step: int) -> None:
        self.folder = Path(folder)
        self.per_step = per_step
        self.folder.mkdir(parents=True, exist_ok=True)

    def choose(self, scored_B: Tensor, needed_B: Tensor) -> list[int]:
        """Rows to write: scored ones first, then those that fell back."""
        order = scored_B.nonzero()[:, 0].tolist() + (needed_B & ~scored_B).nonzero()[:, 0].tolist()
        return order[: self.per_step]

    def write(self, step: int, **row: Any) -> None:
        """Write one response; tensors become lists."""
        plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in row.items()}
        with (self.folder / f"step_{step:06d}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **plain}) + "\n")
