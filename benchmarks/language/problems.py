"""Problems for a small language model, each a plain prompt with worked examples whose last line is `#### N`.

| kind         | problems                                                | solved by SmolLM2-135M, short / long |
|--------------|---------------------------------------------------------|--------------------------------------|
| `words`      | somebody gets and gives away things                     |                                      |
| `arithmetic` | sums and differences, `chain_sum` of reasoning-gym      |                                      |
| `gsm8k`      | a file of questions and answers as GSM8K's, JSON lines  |                                      |

The long ones ask for about 200 tokens of reasoning, the short ones for about 40.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["words", "arithmetic", "gsm8k"]

NAMES = ["Anna", "Ben", "Carla", "Dev", "Ella", "Finn", "Gita", "Hugo"]
THINGS = ["apples", "books", "coins", "pens", "shells", "stamps", "marbles", "cards"]


class Problem(NamedTuple):
    prompt: str  # worked examples, the question, and `Answer:`
    answer: str  # the right number
    kind: Kind


class Solved(NamedTuple):
    """A question with a solution, which ends in `#### N`."""

    question: str
    solution: str

    @property
    def answer(self) -> str:
        return self.solution.rpartition("#### ")[2].replace(",", "")


def problems(kind: Kind, long: bool = False, seed: int = 0, questions: Path | None = None) -> Iterator[Problem]:
    """Problems of a kind, without end but for `gsm8k`; the same for the same seed, and the same worked examples for all seeds.

    `questions`: the file for `gsm8k`. Raises ValueError where it is missing, or reasoning-gym is not installed.
    """
    if kind == "gsm8k":
        shown, asked = _of_file(questions, long, seed)
    else:
        draw = {"words": _words, "arithmetic": _arithmetic}[kind]
        shown, asked = islice(draw(long, 1000), 2 if long else 4), draw(long, seed)
    head = "".join(f"Question: {one.question}\nAnswer: {one.solution}\n\n" for one in shown)
    return (Problem(f"{head}Question: {one.question}\nAnswer:", one.answer, kind) for one in asked)


def _words(long: bool, seed: int) -> Iterator[Solved]:
    rng = random.Random(seed)
    while True:
        name, things, have = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 12)
        question, solution = f"{name} has {have} {things}.", f"{name} starts with {have} {things}."
        for step in range(rng.randint(5, 7) if long else rng.choice([1, 2, 2, 3])):
            number = rng.randint(2, 9)
            more = rng.random() < 0.5 or have < number
            told, sign = (f"{name} gets {number} more", "+") if more else (f"{name} gives {number} away", "-")
            after = have + number if more else have - number
            question += f" {told}."
            if long:
                solution += f" Step {step + 1}: {told}. There were {have} {things}, so now there are "
                solution += f"{have} {sign} {number} = {after} {things}."
            else:
                solution += f" {told}, so {have} {sign} {number} = {after} {things}."
            have = after
        yield Solved(f"{question} How many {things} does {name} have now?", f"{solution}\n#### {have}")


def _arithmetic(long: bool, seed: int) -> Iterator[Solved]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("problems of the kind arithmetic need reasoning-gym: pip install reasoning-gym") from error
    least, most = (7, 9) if long else (3, 4)
    options = {"min_terms": least, "max_terms": most, "min_digits": 1, "max_digits": 1}
    # Problem i of seed s is problem i + 1 of seed s - 1.
    for item in reasoning_gym.create_dataset("chain_sum", seed=seed * 2**20, size=2**20, **options):
        first, *rest = re.findall(r"[-+] \d+|\d+", item["metadata"]["expression"])
        steps, total = [], int(first)
        for term in rest:
            after = total + int(term.replace(" ", ""))
            steps.append(
                f"The sum so far is {total}. The next is {term}, so {total} {term} = {after}."
                if long
                else f"{total} {term} = {after}."
            )
            total = after
        yield Solved(item["question"], f"{' '.join(steps)}\n#### {total}")


def _of_file(questions: Path | None, long: bool, seed: int) -> tuple[Sequence[Solved], Sequence[Solved]]:
    """Worked examples, the first ones of about the wanted length, and the other questions in an order of `seed`."""
    if questions is None or not questions.is_file():
        raise ValueError(f"--questions {questions}: the kind gsm8k needs a file of JSON lines with question and answer")
    rows = map(json.loads, questions.read_text(encoding="utf-8").splitlines())
    solved = [Solved(row["question"], re.sub("<<.*?>>", "", row["answer"])) for row in rows]
    low, high = (500, 700) if long else (80, 160)
    shown = [one for one in solved if low <= len(one.solution) <= high][: 1 if long else 3]
    asked = [one for one in solved if one not in shown]
    random.Random(seed).shuffle(asked)
    return shown, asked
