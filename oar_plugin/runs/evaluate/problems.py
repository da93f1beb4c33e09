"""The problems of an evaluation, from the files that `oar data` writes."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = ("prompt", "reward_model")


class EvaluationError(Exception):
    """An evaluation cannot go on. The message says what to do."""


def reason(error: Exception) -> str:
    """Return the first line of an exception's message, or its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclass(frozen=True)
class Problem:
    prompt: list[dict[str, str]]  # messages, as the chat template takes them
    ground_truth: str


@dataclass(frozen=True)
class ProblemSet:
    name: str
    problems: list[Problem]

    @property
    def digest(self) -> str:
        """A hash of the problems and their order."""
        text = json.dumps([(problem.prompt, problem.ground_truth) for problem in self.problems], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(name: str, folder: Path, limit: int | None) -> ProblemSet:
    """Return a data set by name, from `folder/NAME/test.parquet`, or of a parquet file in verl's columns.

    Equal prompts are kept once; `limit` keeps the first problems. EvaluationError: the file is missing, broken or empty.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    is_file = name.endswith(".parquet")
    path = Path(name).expanduser() if is_file else folder / name / "test.parquet"
    if not path.is_file():
        hint = "no such file" if is_file else f"{path} is not there: oar data {name} --out {folder} makes it"
        raise EvaluationError(f"--data={name}: {hint}")
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=list(COLUMNS)).to_pylist()
        by_prompt = {json.dumps(row["prompt"]): (row["prompt"], row["reward_model"]["ground_truth"]) for row in rows}
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"--data={name}: cannot read {path}: {reason(error)}; it must be a parquet file in verl's columns "
            f"{' and '.join(COLUMNS)} (with ground_truth), as oar data writes them"
        ) from error
    problems = [Problem(prompt, str(truth)) for prompt, truth in by_prompt.values()][:limit]
    if not problems:
        raise EvaluationError(f"--data={name}: {path} holds no row")
    return ProblemSet(path.stem if is_file and path.stem != "test" else path.parent.name, problems)
