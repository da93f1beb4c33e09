"""The demo's problems as the parquet files that verl reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.cpu_demo.task import DATA_SOURCE, Problem, problems

TRAIN_SEED, HELD_OUT_SEED = 1_000_000, 2_000_000


def rows(split: str, chosen: Sequence[Problem]) -> list[dict[str, Any]]:
    """verl's columns, one row for each problem."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(chosen)
    ]


def held_out(count: int) -> list[Problem]:
    """Problems to measure accuracy on: the same in every run, whatever its seed."""
    return problems(HELD_OUT_SEED, count)


def write_data(folder: Path, seed: int, train: int, validation: Sequence[Problem]) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``val.parquet``; no problem of the second is in the first."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = problems(TRAIN_SEED + seed, train, exclude=frozenset(validation))
    paths = folder / "train.parquet", folder / "val.parquet"
    for path, split, part in zip(paths, ("train", "val"), (chosen, validation), strict=True):
        pq.write_table(pa.Table.from_pylist(rows(split, part)), path)
    return paths
