"""Tasks in which it is known which tokens of a response decide its answer.

A response takes some steps, each behind a few filler words drawn at random (entropy that decides nothing), and then writes
`#### ` and its answer. A step ends in one or more *results*, the causal tokens: a wrong one makes the answer wrong, all else
is filler, a copy of the prompt, or form.

| task       | prompt                    | a step        | how results reach the answer             |
|------------|---------------------------|---------------|------------------------------------------|
| `parallel` | `3 + 4 ; 9 - 2 ; ... = ?` | `3 + 4 = 7 ;` | directly: the answer lists them all      |
| `chain`    | `3 ; + 4 ; - 2 ; ... = ?` | `3 + 4 = 7 ;` | each through the next, the last directly |

The studies' own tasks, which small models learn whatever their seed, are in `benchmarks.learning.tasks`.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.tiny.words import DIGITS, EOS, MARK, MARKER, VALUES, WORDS, encode, pieces
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens

_FINDER = make_finder(("hash",))


@dataclass(frozen=True)
class Problem:
    prompt: tuple[int, ...]  # token ids, as many for all problems of a task
    answer: tuple[int, ...]  # the right one, likewise
    content: Any  # what the task itself needs to solve it


@dataclass(frozen=True)
class Reading:
    """What is in a response; positions count from its first token."""

    length: int  # tokens up to the end of sequence, which counts
    ended: bool  # it has one
    segments: np.ndarray | None  # int8 [length] of `Segment`; None where there is no answer
    right: bool  # it ended, and its answer is the right one
    causal: tuple[int, ...]  # positions of results in the reasoning, ascending


class Step(NamedTuple):
    """One step of a demonstration, as words."""

    copied: tuple[str, ...]
    results: tuple[str, ...]
    distractors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task(ABC):
    name: str
    steps: int  # that a response takes
    filler: tuple[int, int]  # fewest and most filler words before a step
    error_rate: float  # share of the steps that demonstrations for the warm start get wrong

    EQUALS: ClassVar[str] = "="  # stands before the results of a step, and nowhere else in the reasoning
    STEP_LENGTH: ClassVar[int] = 6  # most tokens of a step, filler not counted
    FILLER: ClassVar[Sequence[str]] = WORDS  # each filler word is one of these, all equally likely

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[list[str], Any]:
        """The words of a prompt, and what `solution` needs to know of it."""

    @abstractmethod
    def solution(self, content: Any, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        """The steps, some of them wrong, and the answer that follows from them."""

    def problem(self, rng: random.Random) -> Problem:
        words, content = self.draw(rng)
        _, answer = self.solution(content, random.Random(0), 0.0)
        return Problem(tuple(encode(words)), tuple(encode(answer)), content)

    @cached_property
    def prompt_length(self) -> int:
        return len(self.problem(random.Random(0)).prompt)

    @cached_property
    def max_response_length(self) -> int:
        """Tokens of the longest demonstration and half as many more: a policy may drift towards longer ones."""
        answer_length = len(self.problem(random.Random(0)).answer)
        return 3 * (self.steps * (self.STEP_LENGTH + self.filler[1]) + answer_length + 2) // 2

    def problems(self, seed: int) -> Iterator[Problem]:
        """Endless problems of a seed."""
        rng = random.Random(seed)
        while True:
            yield self.problem(rng)

    def demonstration(
        self, problem: Problem, rng: random.Random, error_rate: float, filler: tuple[int, int] | None = None
    ) -> list[int]:
        """A response with errors: what follows a wrong step goes on from it, and the answer repeats what came out.

        `filler`: in place of the task's own.
        """
        steps, answer = self.solution(problem.content, rng, error_rate)
        words: list[str] = []
        for step in steps:
            words += [rng.choice(self.FILLER) for _ in range(rng.randint(*(filler or self.filler)))]
            words += [*step.distractors, *step.copied, self.EQUALS, *step.results, ";"]
        return [*encode([*words, MARKER, *answer]), EOS]

    def example(self, rng: random.Random, filler: tuple[int, int] | None) -> tuple[Sequence[int], list[int]]:
        """A prompt and a demonstration, for the warm start."""
        problem = self.problem(rng)
        return problem.prompt, self.demonstration(problem, rng, self.error_rate, filler)

    def result_of(self, problem: Problem, words: Sequence[str], at: int) -> str | None:
        """What the result at `at` ought to be by what stands before it in its own step; None: nothing follows."""
        if at < 4 or words[at - 3] not in ("+", "-") or not {words[at - 4], words[at - 2]} <= {*DIGITS}:
            return None
        a, op, b = words[at - 4 : at - 1]
        return str(_modulo_10(int(a), op, int(b)))

    def read(self, problem: Problem, response: Sequence[int]) -> Reading:
        """Find the answer, as the package does in any text, and the results by what stands before them."""
        ids = list(response)
        ended = EOS in ids
        if ended:
            del ids[ids.index(EOS) + 1 :]
        segments = segment_tokens(pieces(ids), _FINDER)
        right = False
        if ended and segments is not None:
            right = tuple(np.array(ids)[segments == Segment.ANSWER].tolist()) == problem.answer
        (equals,) = encode([self.EQUALS])
        causal: list[int] = []
        in_results = False
        for position, token in enumerate(ids[: ids.index(MARK)] if MARK in ids else ids):
            if in_results and token in VALUES:
                causal.append(position)
            else:
                in_results = token == equals
        return Reading(len(ids), ended, segments, right, tuple(causal))


class Parallel(Task):
    """Sums and differences modulo 10 that do not depend on each other."""

    def draw(self, rng: random.Random) -> tuple[list[str], Any]:
        facts = tuple((rng.randrange(10), rng.choice("+-"), rng.randrange(10)) for _ in range(self.steps))
        return [*" ; ".join(f"{a} {op} {b}" for a, op, b in facts).split(), "=", "?"], facts

    def solution(self, content: Any, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        answer = [str(_perhaps_wrong(_modulo_10(*fact), rng, error_rate)) for fact in content]
        facts = (tuple(map(str, fact)) for fact in content)
        return [Step(fact, (result,)) for fact, result in zip(facts, answer, strict=True)], answer


class Chain(Task):
    """A running sum modulo 10: each step goes on from the last result, and the answer is the last one."""

    def draw(self, rng: random.Random) -> tuple[list[str], Any]:
        start = rng.randrange(10)
        operations = tuple((rng.choice("+-"), rng.randrange(10)) for _ in range(self.steps))
        words = [str(start), *(word for op, b in operations for word in (";", op, str(b))), "=", "?"]
        return words, (start, operations)

    def solution(self, content: Any, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        value, operations = content
        steps = []
        for op, b in operations:
            before, value = value, _perhaps_wrong(_modulo_10(value, op, b), rng, error_rate)
            steps.append(Step((str(before), op, str(b)), (str(value),)))
        return steps, [str(value)]


def _modulo_10(a: int, op: str, b: int) -> int:
    return (a + b if op == "+" else a - b) % 10


def _perhaps_wrong(value: int, rng: random.Random, error_rate: float) -> int:
    return (value + rng.choice((-2, -1, 1, 2))) % 10 if rng.random() < error_rate else value


TASKS: dict[str, Task] = {
    "parallel": Parallel("parallel", steps=4, filler=(6, 9), error_rate=0.2),
    "chain": Chain("chain", steps=4, filler=(6, 9), error_rate=0.2),
}
"""By name. Error rates are such that a perfect imitator is right in about 40 % of its attempts."""
