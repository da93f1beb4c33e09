"""Word problems in generated English, solved in sentences: a chain of one to `steps` changes among facts that do not matter.

Mia has 4 pens . Leo likes cups . On Monday Mia buys 3 more pens . On Tuesday Mia loses 2 pens . How many pens does Mia have ?
Well , On Monday Mia buys 3 more pens , that makes 4 + 3 = 7 . On Tuesday Mia loses 2 pens , which gives 7 - 2 = 5 .
So the answer is #### 5
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from benchmarks.tiny.english import (
    ASIDES,
    DAYS,
    END,
    EVENTS,
    LARGEST,
    LEADS,
    ON,
    PEOPLE,
    QUESTIONS,
    SOLVED,
    START,
    THINGS,
)
from benchmarks.tiny.tasks import Problem, Step, Task, summed
from benchmarks.tiny.words import EOS, EVERY, MARKER, PAD, encode

_ASIDE = 0.25
"""Chance of a sentence that does not matter in front of each of the others."""


class Sentences(Task):
    """`filler`: fewest and most lead-ins before a step. Prompts are filled with PAD in front, up to one length."""

    STEP_LENGTH: ClassVar[int] = 22
    VOCAB: ClassVar[int] = len(EVERY)
    SIZE: ClassVar[str] = "1M"

    @property
    def prompt_length(self) -> int:
        return 11 * self.steps + 22

    def draw(self, rng: random.Random) -> tuple[list[str], Any]:
        who, other = rng.sample(PEOPLE, 2)
        what, besides = rng.sample(THINGS, 2)
        names = {"who": who, "other": other, "what": what}
        value = start = rng.randrange(LARGEST // 2)
        changes, told = [], []
        for day in DAYS[: rng.randint(1, self.steps)]:
            numbers = {"+": range(1, min(9, LARGEST - value) + 1), "-": range(1, min(9, value) + 1)}
            numbers["*"] = range(value, value + (0 < value <= 6))
            op = rng.choice([op for op, fitting in numbers.items() if fitting])
            changes.append((op, rng.choice(numbers[op])))
            told.append(f"{ON} {rng.choice(EVENTS[op])}".format(day=day, b=changes[-1][1], **names))
            value = _changed(value, *changes[-1])
        words = []
        for sentence in (rng.choice(START).format(b=start, **names), *told, rng.choice(QUESTIONS).format(**names)):
            if rng.random() < _ASIDE:
                words += rng.choice(ASIDES).format(b=rng.randint(1, 9), other=other, what=besides).split()
            words += sentence.split()
        return words, (start, tuple(changes), tuple(told))

    def problem(self, rng: random.Random) -> Problem:
        words, content = self.draw(rng)
        while len(words) > self.prompt_length:
            words, content = self.draw(rng)
        _, answer = self.solution(content, random.Random(0), 0.0)
        prompt = [PAD] * (self.prompt_length - len(words)) + encode(words)
        return Problem(tuple(prompt), tuple(encode(answer)), content)

    def solution(self, content: Any, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        value, changes, told = content
        steps = []
        for place, (op, number) in enumerate(changes):
            sign, added = ("+", value) if op == "*" else (op, number)
            said = f"{told[place].removesuffix('.')}, {rng.choice(SOLVED)} {value} {sign} {added}"
            value = _changed(value, op, number)
            near = [n for n in range(value - 2, value + 3) if n != value and _in_range(n, changes[place + 1 :])]
            if near and rng.random() < error_rate:
                value = rng.choice(near)
            steps.append(Step(tuple(said.split()), (str(value),)))
        return steps, [str(value)]

    def result_of(self, problem: Problem, words: Sequence[str], at: int) -> str | None:
        total = summed(words[max(0, at - 4) : at - 1])
        return None if total is None else str(total)

    def demonstration(
        self, problem: Problem, rng: random.Random, error_rate: float, filler: tuple[int, int] | None = None
    ) -> list[int]:
        steps, answer = self.solution(problem.content, rng, error_rate)
        words: list[str] = []
        for step in steps:
            words += [word for _ in range(rng.randint(*(filler or self.filler))) for word in rng.choice(LEADS).split()]
            words += [*step.copied, self.EQUALS, *step.results, "."]
        return [*encode([*words, *END.split(), MARKER, *answer]), EOS]


def _in_range(value: int, changes: Sequence[tuple[str, int]]) -> bool:
    """Whether there is a word for the value, and for each that follows from it."""
    values = itertools.accumulate(changes, lambda before, change: _changed(before, *change), initial=value)
    return all(0 <= one <= LARGEST for one in values)


def _changed(value: int, op: str, number: int) -> int:
    return {"+": value + number, "-": value - number, "*": 2 * value}[op]
