"""Word problems for a small language model, as rows for verl."""

import random
from typing import Any

NAMES = ["Anna", "Ben", "Carla", "Dev", "Ella", "Finn", "Gita", "Hugo"]
THINGS = ["apples", "books", "coins", "pens", "shells", "stamps", "marbles", "cards"]
EXAMPLES = 3
"""Worked ones before each problem, as turns of the chat: they show how an answer ends."""
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
    worked = [
        {"role": role, "content": text}
        for question, solution, _ in (problem(drawn) for _ in range(EXAMPLES))
        for role, text in (("user", question), ("assistant", solution))
    ]
    found = []
    for index in range(number):
        question, _, right = problem(asked)
        row: dict[str, Any] = {
            "data_source": "word_problems",
            "prompt": [*worked, {"role": "user", "content": question}],
        }
        row |= {"ability": "math", "reward_model": {"style": "rule", "ground_truth": str(right)}}
        found.append(row | {"extra_info": {"index": index}})
    return found
