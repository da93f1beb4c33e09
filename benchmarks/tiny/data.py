"""Problems as the parquet files that verl reads, and their reward. verl's reward workers load this: it imports little."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tiny.tasks import Problem
from benchmarks.tiny.words import MARKER, text


def write_problems(file: Path, problems: Sequence[Problem]) -> None:
    """verl's columns, in this order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": text(problem.prompt)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": text(problem.answer)},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """1 when the text behind the last `####`, to the end of its line, is the right answer, else 0."""
    marker, behind = solution_str.replace("<eos>", "").rpartition(MARKER)[1:]
    line = next(iter(behind.splitlines()), "")
    right = float(bool(marker) and line.split() == ground_truth.split())
    return {"score": right, "acc": right}
