"""Word problems for a small language model, as rows for verl."""

import random
from typing import Any

from benchmarks.language.problems import NAMES, THINGS, chat, row

EXAMPLES = 3
"""Worked ones before each problem."""
PROMPT_TOKENS = 288
"""More than any prompt has."""


def problem(rng: random.Random) -> tuple[str, str, int]:
    """A question, how it is solved, and the number that is right."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    question = f"{name} has {a} {things}. {name} gets {b} more, then {c} more. How many {things} does {name} have now?"
    first, then = (
        f"First {name} has {a} + {b} = {a + b} {things}.",
        f"Then {name} has {a + b} + {c} = {a + b + c} {things}.",
    )
    return question, f"{first} {then}\n#### {a + b + c}", a + b + c


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """verl's columns of `number` problems; the worked examples are the same for every seed."""
    drawn, asked = random.Random("worked examples"), random.Random(seed)
    worked = [problem(drawn)[:2] for _ in range(EXAMPLES)]
    found = [problem(asked) for _ in range(number)]
    return [
        row("word_problems", chat(worked, question), right, index=index)
        for index, (question, _, right) in enumerate(found)
    ]
