"""Task P ("parallel"): four sums with single digits, each result taken modulo 10.

prompt    ``3 + 4 ; 9 - 2 ; 0 - 6 ; 8 + 8 = ?``
response  ``so we then let us now it 3 + 4 = 7 ; ... #### 7 7 4 6``

Each step starts with six to nine filler words drawn at random: real entropy that decides nothing. Of about 60 response
tokens only the four results decide the answer, so one can see on a page of text whether credit goes where it belongs.

The demonstrations come from a tutor who is wrong at about a quarter of the steps: he misremembers a fifth of the 200
facts (he usually writes the same wrong digit, sometimes the right one) and slips now and then at the others. A model
that imitates him perfectly gets all four sums right in about 37 % of its attempts when it samples; a small one gets near
30 %, and 40 % when it takes the most likely token. Reinforcement learning then has something definite to repair, and
how well the model starts does not depend on where exactly the imitation is stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

STEPS = 4
WORDS = ("so", "then", "now", "well", "ok", "next", "thus", "hmm", "we", "see", "go", "on", "let", "us", "add", "it")
FILLER = (6, 9)
MARKER = "####"
DATA_SOURCE = "oar_demo/four_sums"

MISREMEMBERED = 0.2
RIGHT_WHEN_MISREMEMBERED = 0.35
SLIP = 0.12

Fact = tuple[int, str, int]


def result(fact: Fact) -> int:
    """The right result of ``a op b``, modulo 10."""
    a, op, b = fact
    return (a + b if op == "+" else a - b) % 10


@dataclass(frozen=True)
class Problem:
    """Four sums and what a prompt and a perfect answer to them look like."""

    facts: tuple[Fact, ...]

    @property
    def prompt(self) -> str:
        """What the user asks."""
        return " ; ".join(f"{a} {op} {b}" for a, op, b in self.facts) + " = ?"

    @property
    def answer(self) -> str:
        """The right answer, as it must stand behind ``####``."""
        return " ".join(str(result(fact)) for fact in self.facts)

    @property
    def outline(self) -> str:
        """What a right response looks like, shortened for people."""
        first = self.facts[0]
        a, op, b = first
        return f"so we now … {a} {op} {b} = {result(first)} ; … {MARKER} {self.answer}"


def sample_problem(rng: random.Random) -> Problem:
    """Draw four facts, uniformly."""
    return Problem(tuple((rng.randrange(10), rng.choice("+-"), rng.randrange(10)) for _ in range(STEPS)))


def problems(seed: int, count: int, exclude: frozenset[Problem] = frozenset()) -> list[Problem]:
    """``count`` different problems of this seed, none of them in ``exclude``."""
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        problem = sample_problem(rng)
        if problem not in exclude:
            found[problem] = None
    return list(found)


class Tutor:
    """Writes demonstrations, with the errors that the module's text describes."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        facts: list[Fact] = [(a, op, b) for a in range(10) for op in "+-" for b in range(10)]
        self.misremembered: dict[Fact, int] = {
            fact: (result(fact) + rng.choice((-2, -1, 1, 2))) % 10
            for fact in rng.sample(facts, round(MISREMEMBERED * len(facts)))
        }

    def result(self, fact: Fact, rng: random.Random) -> int:
        """What he writes behind ``a op b =`` this time."""
        right = result(fact)
        if fact in self.misremembered:
            return right if rng.random() < RIGHT_WHEN_MISREMEMBERED else self.misremembered[fact]
        return (right + rng.choice((-2, -1, 1, 2))) % 10 if rng.random() < SLIP else right

    def demonstration(self, problem: Problem, rng: random.Random, filler: tuple[int, int] = FILLER) -> str:
        """One response to ``problem``; its answer repeats the results that he wrote."""
        words: list[str] = []
        results: list[int] = []
        for fact in problem.facts:
            results.append(self.result(fact, rng))
            a, op, b = fact
            words += [rng.choice(WORDS) for _ in range(rng.randint(*filler))]
            words += [str(a), op, str(b), "=", str(results[-1]), ";"]
        return " ".join([*words, MARKER, *map(str, results)])

    def demonstrations(self, seed: int, filler: tuple[int, int] = FILLER) -> Iterator[tuple[Problem, str]]:
        """Endless pairs of a problem and a response to it."""
        rng = random.Random(seed)
        while True:
            problem = sample_problem(rng)
            yield problem, self.demonstration(problem, rng, filler)


def parse_answer(response: str) -> str | None:
    """The text behind the last ``####``, to the end of its line; ``None`` where there is none."""
    _, marker, rest = response.rpartition(MARKER)
    if not marker:
        return None
    lines = rest.splitlines()
    return " ".join(lines[0].split()) if lines else ""


def is_right(response: str, answer: str) -> bool:
    """Whether the response ends in this answer."""
    return parse_answer(response) == answer
