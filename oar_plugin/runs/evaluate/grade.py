"""Reads the problems of an evaluation, and grades responses to them by the recipes' own reward."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oar_plugin.output import cause
from oar_plugin.runs.evaluate import EvaluationError
from oar_plugin.runs.math.answer import FinalAnswer, canonical, final_answer
from oar_plugin.runs.math.pool import TaskCrashed, TaskTimedOut
from oar_plugin.runs.reward import LONGEST_ANSWER, compute_score, start_pool

COLUMNS = ["prompt", "reward_model"]
TIMEOUT_S = 10.0
PROCESSES = max(2, min(16, os.cpu_count() or 2))


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
    """Return the data set in `folder/NAME/test.parquet`, or in a parquet file called NAME, in verl's columns.

    Equal prompts are kept once. `limit`: maximum number of problems. EvaluationError: file is missing, broken or empty.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    is_file = name.endswith(".parquet")
    path = Path(name).expanduser() if is_file else folder / name / "test.parquet"
    if not path.is_file():
        hint = "no such file" if is_file else f"{path} is not there: oar data {name} --out {folder} makes it"
        raise EvaluationError(f"--data={name}: {hint}")
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=COLUMNS).to_pylist()
        by_prompt = {json.dumps(row["prompt"]): (row["prompt"], row["reward_model"]["ground_truth"]) for row in rows}
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"--data={name}: cannot read {path}: {cause(error)}; it must be a parquet file in verl's columns "
            f"{' and '.join(COLUMNS)} (with ground_truth), as oar data writes them"
        ) from error
    problems = [Problem(prompt, str(truth)) for prompt, truth in by_prompt.values()][:limit]
    if not problems:
        raise EvaluationError(f"--data={name}: {path} holds no row")
    return ProblemSet(path.stem if is_file and path.stem != "test" else path.parent.name, problems)


@dataclass(frozen=True)
class GeneratedResponse:
    problem: int  # index in the problem set
    sample: int
    text: str
    cut: bool  # truncated at the maximum length


@dataclass(frozen=True)
class Graded:
    """Grades of P problems with K responses each. The shares are of all responses."""

    correct_PK: NDArray[np.bool_]
    majority_P: NDArray[np.float64]  # maj@K
    no_answer: float  # share without a final answer
    cut: float  # share with the maximum number of tokens
    failed: float  # share that counts as wrong because the comparison took too long or crashed


class Judgement(NamedTuple):
    right: bool
    name: str | None  # equal for answers that mean the same; None without an answer
    failed: bool = False


def grade(
    problems: ProblemSet,
    responses: Mapping[tuple[int, int], GeneratedResponse],
    samples: int,
    progress: Callable[[int, int], None],
) -> Graded:
    """Grade the first `samples` responses per problem, but equal answers once. EvaluationError: no comparison works."""
    keys = [
        [(problem, final_answer(responses[problem, sample].text)) for sample in range(samples)]
        for problem in range(len(problems.problems))
    ]
    # One response per answer: the reward takes a whole response.
    texts = {
        (problem, answer): responses[problem, sample].text
        for row in keys
        for sample, (problem, answer) in enumerate(row)
        if answer is not None
    }
    judged: dict[tuple[int, FinalAnswer | None], Judgement] = {}
    with ThreadPoolExecutor(PROCESSES) as threads:
        for key, judgement in zip(texts, threads.map(partial(_judge, problems), texts, texts.values()), strict=True):
            judged[key] = judgement
            progress(len(judged), len(texts))
    if failures := sum(each.failed for each in judged.values()):
        _check_pool(problems.name, failures == len(judged))
    votes = [[judged.get(key, Judgement(False, None)) for key in row] for row in keys]
    return Graded(
        correct_PK=np.array([[each.right for each in row] for row in votes]),
        majority_P=np.array([majority([each.name for each in row], [each.right for each in row]) for row in votes]),
        no_answer=float(np.mean([each.name is None for row in votes for each in row])),
        cut=float(np.mean([response.cut for (_, sample), response in responses.items() if sample < samples])),
        failed=float(np.mean([each.failed for row in votes for each in row])),
    )


def _check_pool(name: str, all_failed: bool) -> None:
    """Test the pool after failed comparisons. EvaluationError: this test fails too, or all comparisons failed."""
    try:
        start_pool(PROCESSES, TIMEOUT_S).run(canonical, FinalAnswer("1", boxed=True))
    except (TaskTimedOut, TaskCrashed) as error:
        raise EvaluationError(f"{name}: no answers can be compared here: {error}; responses are kept") from error
    if all_failed:
        raise EvaluationError(
            f"{name}: every comparison with the ground truth took longer than {TIMEOUT_S:g} s or crashed; responses are kept"
        )


def _judge(problems: ProblemSet, key: tuple[int, FinalAnswer], text: str) -> Judgement:
    problem, answer = key
    truth = problems.problems[problem].ground_truth
    score = compute_score(problems.name, text, truth, timeout_s=TIMEOUT_S, processes=PROCESSES)
    name = "".join(answer.text.split())
    if len(answer.text) <= LONGEST_ANSWER:
        with suppress(TaskTimedOut, TaskCrashed):
            name = start_pool(PROCESSES, TIMEOUT_S).run(canonical, answer)
    return Judgement(score["acc"] == 1.0, name, score["failed"] == 1.0)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return maj@K of one problem: the mean grade of the responses with the most frequent answer.

    Responses without an answer (None) do not vote. If several answers are equally frequent, the mean is over all of their
    responses. A mean is needed even for one answer: responses with the same canonical answer can have different grades.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    chosen = {answer for answer, count in votes.items() if count == max(votes.values())}
    return float(np.mean([right for answer, right in zip(answers, correct, strict=True) if answer in chosen]))
