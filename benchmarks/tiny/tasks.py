"""Tasks in which it is known which tokens of a response decide its answer.

A response takes some steps, each behind a few filler words drawn at random (entropy that decides nothing), and then writes
`#### ` and its answer. A step ends in one or more *results*, the causal tokens: a wrong one makes the answer wrong, all else
is filler, a copy of the prompt, or form.

| task            | prompt                         | a step        | how results reach the answer            |
|-----------------|--------------------------------|---------------|-----------------------------------------|
| `parallel`      | `3 + 4 ; 9 - 2 ; ... = ?`      | `3 + 4 = 7 ;` | directly: the answer lists them all     |
| `parallel_terse`, `parallel_wordy` | the same | the same        | the same, with hardly any filler, or twice as much |
| `chain`         | `3 ; + 4 ; - 2 ; ... = ?`      | `3 + 4 = 7 ;` | each through the next, the last directly |
| `chain_terse`, `chain_wordy` | the same          | the same      | the same, with hardly any filler, or twice as much |
| `lookup`        | `A : D ; B : G ; ... ; A ?`    | `A -> D ;`    | each through the next, among distractors |
| `tracking`      | `3 8 5 / A B / B C / ... = ?`  | `A B = 8 3 5 ;` | state by state, the last one directly |
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from benchmarks.tiny.words import EOS, MARK, NAMES, VALUES, encode, pieces
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from recipes.cpu_demo.task import MARKER, WORDS, result

_FINDER = make_finder(("hash",))
_OFF_BY = (-2, -1, 1, 2)
_KEYS = NAMES[:6]


@dataclass(frozen=True)
class Problem:
    """What is asked.

    Attributes:
        prompt: token ids; of one length for all problems of a task.
        answer: token ids of the right answer.
        content: what the task itself needs to solve it.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    content: Any


@dataclass(frozen=True)
class Reading:
    """What is in a response; positions count from its first token.

    Attributes:
        length: tokens up to the end of sequence, which counts.
        ended: it has one.
        segments: int8 `[length]` of `Segment`; None where there is no answer.
        right: it ended, and its answer is the right one.
        causal: positions of results in the reasoning, ascending.
        step: the step (from 0) that each of these belongs to.
    """

    length: int
    ended: bool
    segments: np.ndarray | None
    right: bool
    causal: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One step of a demonstration, as words: distractors, what is copied, and what is worked out."""

    copied: tuple[str, ...]
    results: tuple[str, ...]
    distractors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task(ABC):
    """One kind of problem.

    Attributes:
        name: of the task.
        steps: that a response takes.
        filler: fewest and most filler words before a step.
        error_rate: share of the steps that demonstrations for the warm start get wrong.
    """

    name: str
    steps: int
    filler: tuple[int, int]
    error_rate: float

    EQUALS: ClassVar[str] = "="
    """Stands before the results of a step, and nowhere else in the reasoning."""

    # ---- what a task defines

    @abstractmethod
    def problem(self, rng: random.Random) -> Problem:
        """Draw a problem."""

    @abstractmethod
    def solution(self, problem: Problem, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        """The steps, some of them wrong, and the answer that follows from them."""

    @property
    @abstractmethod
    def prompt_length(self) -> int:
        """Tokens of every prompt."""

    @property
    @abstractmethod
    def step_length(self) -> int:
        """Most tokens of a step, filler not counted."""

    @property
    @abstractmethod
    def answer_length(self) -> int:
        """Tokens of an answer."""

    # ---- what they share

    @property
    def max_response_length(self) -> int:
        """Tokens of the longest demonstration and half as many more: a policy may drift towards longer ones."""
        return 3 * (self.steps * (self.step_length + self.filler[1]) + self.answer_length + 2) // 2

    def demonstration(
        self, problem: Problem, rng: random.Random, error_rate: float, filler: tuple[int, int] | None = None
    ) -> list[int]:
        """A response.

        Args:
            problem: that it answers.
            rng: of filler and errors.
            error_rate: of each step; what follows a wrong step goes on from it, and the answer repeats what was found.
            filler: fewest and most filler words before a step; None for the task's own.
        """
        steps, answer = self.solution(problem, rng, error_rate)
        words: list[str] = []
        for step in steps:
            words += [rng.choice(WORDS) for _ in range(rng.randint(*(filler or self.filler)))]
            words += [*step.distractors, *step.copied, self.EQUALS, *step.results, ";"]
        return [*encode([*words, MARKER, *answer]), EOS]

    def read(self, problem: Problem, response: Sequence[int]) -> Reading:
        """Find the answer, as the package does in any text, and the results by what stands before them."""
        ids = list(response)
        ended = EOS in ids
        if ended:
            del ids[ids.index(EOS) + 1 :]
        segments = segment_tokens(pieces(ids), _FINDER)
        right = False
        if ended and segments is not None:
            right = tuple(t for t, s in zip(ids, segments, strict=True) if s == Segment.ANSWER) == problem.answer
        causal, of_step = self._results(ids)
        return Reading(len(ids), ended, segments, right, causal, of_step)

    def problems(self, seed: int) -> Iterator[Problem]:
        """Endless problems of a seed."""
        rng = random.Random(seed)
        while True:
            yield self.problem(rng)

    def _results(self, ids: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (equals,) = encode([self.EQUALS])
        causal, of_step, step, inside = [], [], -1, False
        for position, token in enumerate(ids[: ids.index(MARK)] if MARK in ids else ids):
            if token == equals:
                step, inside = step + 1, True
            elif inside and token in VALUES:
                causal.append(position)
                of_step.append(step)
            else:
                inside = False
        return tuple(causal), tuple(of_step)


@dataclass(frozen=True)
class Parallel(Task):
    """Sums of two digits modulo 10, independent of each other; the answer lists the results."""

    def problem(self, rng: random.Random) -> Problem:
        facts = [(rng.randrange(10), rng.choice("+-"), rng.randrange(10)) for _ in range(self.steps)]
        words = [word for a, op, b in facts for word in (str(a), op, str(b), ";")]
        return Problem(tuple(encode([*words[:-1], "=", "?"])), tuple(result(fact) for fact in facts), tuple(facts))

    def solution(self, problem: Problem, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        steps, answer = [], []
        for a, op, b in problem.content:
            found = str(_perhaps_wrong(result((a, op, b)), rng, error_rate))
            steps.append(Step((str(a), op, str(b)), (found,)))
            answer.append(found)
        return steps, answer

    @property
    def prompt_length(self) -> int:
        return 4 * self.steps + 1

    @property
    def step_length(self) -> int:
        return 6

    @property
    def answer_length(self) -> int:
        return self.steps


@dataclass(frozen=True)
class Chain(Task):
    """A running sum modulo 10: each step goes on from the last result, and the answer is the last one."""

    def problem(self, rng: random.Random) -> Problem:
        start = rng.randrange(10)
        operations = [(rng.choice("+-"), rng.randrange(10)) for _ in range(self.steps)]
        value = start
        for op, b in operations:
            value = result((value, op, b))
        words = [str(start), *(word for op, b in operations for word in (";", op, str(b))), "=", "?"]
        return Problem(tuple(encode(words)), (value,), (start, tuple(operations)))

    def solution(self, problem: Problem, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        value, operations = problem.content
        steps = []
        for op, b in operations:
            before, value = value, _perhaps_wrong(result((value, op, b)), rng, error_rate)
            steps.append(Step((str(before), op, str(b)), (str(value),)))
        return steps, [str(value)]

    @property
    def prompt_length(self) -> int:
        return 3 * self.steps + 3

    @property
    def step_length(self) -> int:
        return 6

    @property
    def answer_length(self) -> int:
        return 1


@dataclass(frozen=True)
class Lookup(Task):
    """Follow a few links in a table of six; before each, another line of the table is mentioned."""

    EQUALS: ClassVar[str] = "->"

    def problem(self, rng: random.Random) -> Problem:
        values = list(_KEYS)
        rng.shuffle(values)
        table = dict(zip(_KEYS, values, strict=True))
        lines = rng.sample(_KEYS, len(_KEYS))
        start = last = rng.choice(_KEYS)
        for _ in range(self.steps):
            last = table[last]
        words = [word for key in lines for word in (key, ":", table[key], ";")]
        return Problem(tuple(encode([*words, start, "?"])), tuple(encode([last])), (start, table))

    def solution(self, problem: Problem, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        here, table = problem.content
        steps = []
        for _ in range(self.steps):
            there = table[here]
            if rng.random() < error_rate:
                there = rng.choice([name for name in _KEYS if name != there])
            other = rng.choice(_KEYS)
            steps.append(Step((here,), (there,), (other, ":", table[other], ";")))
            here = there
        return steps, [here]

    @property
    def prompt_length(self) -> int:
        return 4 * len(_KEYS) + 2

    @property
    def step_length(self) -> int:
        return 8

    @property
    def answer_length(self) -> int:
        return 1


@dataclass(frozen=True)
class Tracking(Task):
    """Three cups, two of them swapped at each step; a step writes what is in all of them, and the answer repeats the last."""

    def problem(self, rng: random.Random) -> Problem:
        start = rng.sample(range(10), 3)
        swaps = [tuple(sorted(rng.sample(range(3), 2))) for _ in range(self.steps)]
        state = start
        for swap in swaps:
            state = _swapped(state, swap)
        words = [*map(str, start), *(word for a, b in swaps for word in ("/", NAMES[a], NAMES[b])), "=", "?"]
        return Problem(tuple(encode(words)), tuple(state), (tuple(start), tuple(swaps)))

    def solution(self, problem: Problem, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        state, swaps = problem.content
        steps = []
        for swap in swaps:
            state = _swapped(state, swap)
            if rng.random() < error_rate:
                state = _swapped(state, rng.sample(range(3), 2))
            steps.append(Step((NAMES[swap[0]], NAMES[swap[1]]), tuple(map(str, state))))
        return steps, [str(value) for value in state]

    @property
    def prompt_length(self) -> int:
        return 3 + 3 * self.steps + 2

    @property
    def step_length(self) -> int:
        return 7

    @property
    def answer_length(self) -> int:
        return 3


def _perhaps_wrong(value: int, rng: random.Random, error_rate: float) -> int:
    return (value + rng.choice(_OFF_BY)) % 10 if rng.random() < error_rate else value


def _swapped(state: Sequence[int], swap: Sequence[int]) -> list[int]:
    found = list(state)
    a, b = swap
    found[a], found[b] = found[b], found[a]
    return found


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Parallel("parallel", steps=4, filler=(6, 9), error_rate=0.2),
        Parallel("parallel_terse", steps=4, filler=(0, 2), error_rate=0.2),
        Parallel("parallel_wordy", steps=4, filler=(14, 17), error_rate=0.2),
        Chain("chain", steps=4, filler=(6, 9), error_rate=0.2),
        Chain("chain_terse", steps=4, filler=(0, 2), error_rate=0.2),
        Chain("chain_wordy", steps=4, filler=(14, 17), error_rate=0.2),
        Lookup("lookup", steps=3, filler=(4, 7), error_rate=0.27),
        Tracking("tracking", steps=3, filler=(5, 8), error_rate=0.27),
    )
}
"""By name. Error rates are such that a perfect imitator is right in 35 to 41 % of its attempts."""
