"""The tasks of the study: it is known which tokens of a response decide its answer, and which of those are wrong.

Like `benchmarks.tiny.tasks`, but small models learn each of them whatever their seed: every step has a name, which the prompt
has as well, and sums are small ones.

| task             | prompt                                | a step            | how results reach the answer                 |
|------------------|---------------------------------------|-------------------|----------------------------------------------|
| `parallel`       | `A 3 + 2 ; B 9 - 1 ; ... = ?`         | `A 3 + 2 = 5 ;`   | directly: the answer lists them all          |
| `chain`          | `3 ; A + 2 ; B - 1 ; ... = ?`         | `A 3 + 2 = 5 ;`   | each through the next, the last one directly |
| `lookup`         | `A 5 ; B 4 ; C 0 ; ... 1 ?`           | `/ C 0 ; = B 4 ;` | likewise; what stands behind `/` never does  |
| `chain_quiet`    | as `chain`                            |                   | filler has the entropy of results            |

`parallel_2` and `chain_2` have two steps in place of four; imitators of `parallel_2_rare` are right less often.

In front of a step stand filler words. They are drawn from sixteen, with four times the entropy of a result; or, in
`chain_quiet`, like a result that is wrong in one case of five: the same word four times out of five, else one of four others.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from benchmarks.tiny.tasks import Chain, Parallel, Problem, Reading, Step, Task
from benchmarks.tiny.words import DIGITS, NAMES, VOCABULARY, WORDS

QUIET = ("so",) * 16 + WORDS[1:5]
"""An error rate of 0.2 over four wrong values, in words."""
_SUM = "+-"


def wrong_results(task: Task, problem: Problem, response: Sequence[int], reading: Reading) -> tuple[int, ...]:
    """Positions of the results that do not follow from what stands before them in their own step."""
    words = [VOCABULARY[token] for token in response]
    return tuple(at for at in reading.causal if task.result_of(problem, words, at) != words[at])


def _named(steps: Sequence[Step]) -> list[Step]:
    return [Step((name, *step.copied), step.results) for name, step in zip(NAMES, steps, strict=False)]


class NamedParallel(Parallel):
    STEP_LENGTH: ClassVar[int] = 7

    def draw(self, rng: random.Random) -> tuple[list[str], Any]:
        facts = tuple((rng.randrange(10), rng.choice(_SUM), rng.randint(1, 3)) for _ in range(self.steps))
        lines = zip(NAMES, facts, strict=False)
        return [*(word for name, fact in lines for word in (name, *map(str, fact), ";")), "=", "?"], facts

    def solution(self, content: Any, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        steps, answer = super().solution(content, rng, error_rate)
        return _named(steps), answer


class NamedChain(Chain):
    STEP_LENGTH: ClassVar[int] = 7

    def draw(self, rng: random.Random) -> tuple[list[str], Any]:
        start = rng.randrange(10)
        operations = tuple((rng.choice(_SUM), rng.randint(1, 3)) for _ in range(self.steps))
        lines = zip(NAMES, operations, strict=False)
        words = [str(start), *(word for name, (op, b) in lines for word in (";", name, op, str(b))), "=", "?"]
        return words, (start, operations)

    def solution(self, content: Any, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        steps, answer = super().solution(content, rng, error_rate)
        return _named(steps), answer


class OrderedLookup(Task):
    """Line `A 5` says where to go from 0: to 5. Before each some line is mentioned that leads nowhere, and as often wrong."""

    STEP_LENGTH: ClassVar[int] = 8
    LINES: ClassVar[int] = 6

    def draw(self, rng: random.Random) -> tuple[list[str], Any]:
        values = rng.sample(range(self.LINES), self.LINES)
        start = rng.randrange(self.LINES)
        words = [word for name, value in zip(NAMES, values, strict=False) for word in (name, str(value), ";")]
        return [*words, str(start), "?"], (start, tuple(values))

    def solution(self, content: Any, rng: random.Random, error_rate: float) -> tuple[list[Step], list[str]]:
        here, table = content

        def written(line: int) -> int:
            others = [value for value in range(self.LINES) if value != table[line]]
            return rng.choice(others) if rng.random() < error_rate else int(table[line])

        steps = []
        for _ in range(self.steps):
            other, there = rng.randrange(self.LINES), written(here)
            aside = ("/", NAMES[other], str(written(other)), ";")
            # `EQUALS` stands in front of the name here, so that a line reads as in the prompt.
            steps.append(Step((), (NAMES[here], str(there)), aside))
            here = there
        return steps, [str(here)]

    def result_of(self, problem: Problem, words: Sequence[str], at: int) -> str | None:
        _, table = problem.content
        line = NAMES.index(words[at - 1]) if words[at - 1] in NAMES else len(table)
        return str(table[line]) if line < len(table) else None

    def read(self, problem: Problem, response: Sequence[int]) -> Reading:
        found = super().read(problem, response)
        digits = tuple(at for at in found.causal if VOCABULARY[response[at]] in DIGITS)
        return Reading(found.length, found.ended, found.segments, found.right, digits)


class QuietChain(NamedChain):
    FILLER: ClassVar[Sequence[str]] = QUIET


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        NamedParallel("parallel", steps=4, filler=(5, 8), error_rate=0.2),
        NamedChain("chain", steps=4, filler=(5, 8), error_rate=0.2),
        OrderedLookup("lookup", steps=3, filler=(4, 7), error_rate=0.27),
        QuietChain("chain_quiet", steps=4, filler=(5, 8), error_rate=0.2),
        NamedParallel("parallel_2", steps=2, filler=(5, 8), error_rate=0.36),
        NamedParallel("parallel_2_rare", steps=2, filler=(5, 8), error_rate=0.55),
        NamedChain("chain_2", steps=2, filler=(5, 8), error_rate=0.36),
    )
}
"""By name. Error rates are such that a perfect imitator is right in about 40 % of its attempts; `rare`: 20 %."""


def lessons(task: Task, rng: random.Random, filler: tuple[int, int]) -> Iterator[Task]:
    """Endless easier forms of a task, without errors: of one step, of two, of any number."""
    kind = type(task)
    while True:
        yield kind(task.name, rng.randint(1, task.steps), filler, 0.0)
