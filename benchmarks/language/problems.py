"""Problems for a small language model, each a chat with few-shot examples, whose last line is `#### N`.

`words`: somebody gets things and gives some away. `arithmetic`: sums, `chain_sum` of reasoning-gym. `gsm8k`: a file of
questions and answers. Long ones ask for about 200 tokens of reasoning, short ones for about 40; the first two always for as
many steps, or a small model does not find the end.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

KINDS = ("words", "arithmetic", "gsm8k")

NAMES = ["Anna", "Ben", "Carla", "Dev", "Ella", "Finn", "Gita", "Hugo"]
THINGS = ["apples", "books", "coins", "pens", "shells", "stamps", "marbles", "cards"]
EXAMPLES = 1000
"""Seed of the few-shot examples, which are the same for all problems of a kind and length."""

Solved: TypeAlias = tuple[str, str]
"""A question and its solution."""


class Problem(NamedTuple):
    prompt: list[dict[str, str]]  # messages: few-shot examples as turns, then the question
    answer: str  # the right number


def chat(shown: Sequence[Solved], asked: str) -> list[dict[str, str]]:
    """Few-shot examples as turns, which show how an answer ends, then the question."""
    texts = [*(text for solved in shown for text in solved), asked]
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


def row(source: str, prompt: list[dict[str, str]], answer: int, **more: Any) -> dict[str, Any]:
    """verl's columns of a problem, as `oar data` writes them; `more`: its `extra_info`."""
    rule = {"style": "rule", "ground_truth": str(answer)}
    return {"data_source": source, "prompt": prompt, "ability": "math", "reward_model": rule, "extra_info": more}


def solved_sum(numbers: Sequence[int]) -> Solved:
    """A sum, solved step by step."""
    steps = [f"{a} + {b} = {a + b}." for a, b in zip(accumulate(numbers), numbers[1:], strict=False)]
    return f"What is {' + '.join(map(str, numbers))}?", f"{' '.join(steps)}\n#### {sum(numbers)}"


def problems(kind: str, long: bool = False, seed: int = 0, questions: Path | None = None) -> Iterator[Problem]:
    """Problems of a kind, the same for the same seed, without end but for `gsm8k`, whose file is `questions`.

    Raises ValueError for an unknown kind, where the file is missing, or where reasoning-gym is not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"--tasks {kind}: allowed with --model: {', '.join(KINDS)}")
    if kind == "gsm8k":
        shown, asked = _of_file(questions, long, seed)
    else:
        draw = {"words": _words, "arithmetic": _arithmetic}[kind]
        shown, asked = list(islice(draw(long, EXAMPLES), 2 if long else 4)), draw(long, seed)
    for question, solution in asked:
        yield Problem(chat(shown, question), solution.rpartition("#### ")[2].replace(",", ""))


def _words(long: bool, seed: int) -> Iterator[Solved]:
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


def _arithmetic(long: bool, seed: int) -> Iterator[Solved]:
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
        yield solved_sum([*map(int, item["metadata"]["expression"].replace("-", "+").split(" + "))])


def _of_file(questions: Path | None, long: bool, seed: int) -> tuple[list[Solved], Iterator[Solved]]:
    """Few-shot examples, the first ones of about the wanted length, and the others in an order of `seed`."""
    if questions is None or not questions.is_file():
        raise ValueError(f"--questions {questions}: the kind gsm8k needs a file of JSON lines with question and answer")
    rows = map(json.loads, questions.read_text(encoding="utf-8").splitlines())
    pairs = [(row["question"], re.sub("<<.*?>>", "", row["answer"])) for row in rows]
    low, high = (500, 700) if long else (80, 160)  # characters
    shown = [pair for pair in pairs if low <= len(pair[1]) <= high][: 2 if long else 3]
    asked = [pair for pair in pairs if pair not in shown]
    random.Random(seed).shuffle(asked)
    return shown, iter(asked)
