"""Problems for a small language model, each a chat with worked examples, whose last line is `#### N`.

`words`: somebody gets things and gives some away. `arithmetic`: sums, `chain_sum` of reasoning-gym. `gsm8k`: a file of
questions and answers. Long ones ask for about 200 tokens of reasoning, short ones for about 40; the first two always for as
many steps, or a small model does not find the end.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Kind = Literal["words", "arithmetic", "gsm8k"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NAMES = ["Anna", "Ben", "Carla", "Dev", "Ella", "Finn", "Gita", "Hugo"]
THINGS = ["apples", "books", "coins", "pens", "shells", "stamps", "marbles", "cards"]
EXAMPLES = 1000
"""Seed of the worked examples, which are the same for all problems of a kind and length."""


class Problem(NamedTuple):
    prompt: list[dict[str, str]]  # messages: worked examples as turns, then the question
    answer: str  # the right number
    kind: Kind


def problems(kind: Kind, long: bool = False, seed: int = 0, questions: Path | None = None) -> Iterator[Problem]:
    """Problems of a kind, the same for the same seed, without end but for `gsm8k`, whose file is `questions`.

    Raises ValueError for an unknown kind, where the file is missing, or where reasoning-gym is not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"--tasks {kind}: allowed with --model: {', '.join(KINDS)}")
    shown: Iterable[tuple[str, str]]
    asked: Iterable[tuple[str, str]]
    if kind == "gsm8k":
        shown, asked = _of_file(questions, long, seed)
    else:
        draw = {"words": _words, "arithmetic": _arithmetic}[kind]
        shown, asked = islice(draw(long, EXAMPLES), 2 if long else 4), draw(long, seed)
    roles = "user", "assistant"
    head = [{"role": role, "content": text} for pair in shown for role, text in zip(roles, pair, strict=True)]
    for question, solution in asked:
        prompt = [*head, {"role": "user", "content": question}]
        yield Problem(prompt, solution.rpartition("#### ")[2].replace(",", ""), kind)


# Each of the following has pairs of a question and its solution.


def _words(long: bool, seed: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    while True:
        name, things, have = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 12)
        question, solution = f"{name} has {have} {things}.", f"{name} starts with {have} {things}."
        for step in range(6 if long else 2):
            number = rng.randint(2, 9)
            more = rng.random() < 0.5 or have < number
            told = f"{name} gets {number} more" if more else f"{name} gives {number} away"
            after = have + number if more else have - number
            sums = f"{have} {'+' if more else '-'} {number} = {after} {things}."
            question += f" {told}."
            told = f"Step {step + 1}: {told}. There were {have} {things}, so now there are" if long else f"{told}, so"
            solution, have = f"{solution} {told} {sums}", after
        yield f"{question} How many {things} does {name} have now?", f"{solution}\n#### {have}"


def _arithmetic(long: bool, seed: int) -> Iterator[tuple[str, str]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("problems of the kind arithmetic need reasoning-gym: pip install reasoning-gym") from error
    terms = 12 if long else 3
    # With seed s + 1, its problem i would be problem i + 1 of seed s.
    size = {
        "min_terms": terms,
        "max_terms": terms,
        "min_digits": 1,
        "max_digits": 1,
        "seed": seed << 20,
        "size": 1 << 20,
    }
    for item in reasoning_gym.create_dataset("chain_sum", **size):
        # Without differences: they are too hard for a model that is to solve some.
        first, *rest = item["metadata"]["expression"].replace("-", "+").split(" + ")
        steps, total = [], int(first)
        for term in rest:
            steps.append(f"{total} + {term} = {total + int(term)}.")
            total += int(term)
        yield f"What is {' + '.join([first, *rest])}?", f"{' '.join(steps)}\n#### {total}"


def _of_file(questions: Path | None, long: bool, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Worked examples, the first ones of about the wanted length, and the others in an order of `seed`."""
    if questions is None or not questions.is_file():
        raise ValueError(f"--questions {questions}: the kind gsm8k needs a file of JSON lines with question and answer")
    rows = map(json.loads, questions.read_text(encoding="utf-8").splitlines())
    pairs = [(row["question"], re.sub("<<.*?>>", "", row["answer"])) for row in rows]
    low, high = (500, 700) if long else (80, 160)  # characters
    shown = [pair for pair in pairs if low <= len(pair[1]) <= high][: 2 if long else 3]
    asked = [pair for pair in pairs if pair not in shown]
    random.Random(seed).shuffle(asked)
    return shown, asked
