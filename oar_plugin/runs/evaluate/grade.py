"""Grades responses by the recipes' own reward, and names each answer for the majority vote."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oar_plugin.runs.evaluate.generate import GeneratedResponse
from oar_plugin.runs.evaluate.problems import EvaluationError, ProblemSet
from oar_plugin.runs.evaluate.statistics import majority
from oar_plugin.runs.math.answer import FinalAnswer, canonical, final_answer
from oar_plugin.runs.math.pool import TaskCrashed, TaskTimedOut
from oar_plugin.runs.reward import LONGEST_ANSWER, compute_score, start_pool

TIMEOUT_S = 10.0
PROCESSES = max(2, min(16, os.cpu_count() or 2))


@dataclass(frozen=True)
class Graded:
    """Grades of P problems with K responses each."""

    correct_PK: NDArray[np.bool_]
    majority_P: NDArray[np.float64]  # maj@K
    no_answer: float  # share of responses without a final answer
    cut: float  # share of responses with the maximum number of tokens
    failed: float  # share of responses that count as wrong because the comparison took too long or crashed


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
    """Grade the first `samples` responses of every problem, equal answers once. EvaluationError: no comparison works."""
    table = [[responses[problem, sample] for sample in range(samples)] for problem in range(len(problems.problems))]
    answers = [[final_answer(response.text) for response in row] for row in table]
    # One response per answer: the reward takes a whole response.
    texts = {
        (problem, answer): response.text
        for problem, (row, answers_K) in enumerate(zip(table, answers, strict=True))
        for response, answer in zip(row, answers_K, strict=True)
        if answer is not None
    }
    judged: dict[tuple[int, FinalAnswer], Judgement] = {}
    with ThreadPoolExecutor(PROCESSES) as threads:
        for key, judgement in zip(texts, threads.map(partial(_judge, problems), texts, texts.values()), strict=True):
            judged[key] = judgement
            progress(len(judged), len(texts))
    if failures := sum(each.failed for each in judged.values()):
        _check_pool(problems.name, failures == len(judged))
    votes = [
        [judged[problem, answer] if answer is not None else Judgement(False, None) for answer in answers_K]
        for problem, answers_K in enumerate(answers)
    ]
    return Graded(
        correct_PK=np.array([[each.right for each in row] for row in votes]),
        majority_P=np.array([majority([each.name for each in row], [each.right for each in row]) for row in votes]),
        no_answer=float(np.mean([each.name is None for row in votes for each in row])),
        cut=float(np.mean([response.cut for row in table for response in row])),
        failed=float(np.mean([each.failed for row in votes for each in row])),
    )


def _check_pool(name: str, all_failed: bool) -> None:
    """Compare `1` with itself, as some comparisons failed. EvaluationError: this fails too, or all comparisons failed."""
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
