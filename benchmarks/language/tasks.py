"""Problems that SmolLM2-135M solves in a third to a half of its samples at temperature 1, as rows for verl.

All sums of three numbers from 2 to 9. Four worked examples come before the question, as turns of the chat: they show how an
answer ends. Of sums with numbers up to 12 it solves 14 %, up to 20 5 %, of four numbers 12 %, of stories with two steps 15 %.
"""

import random
from itertools import product
from typing import Any

SOURCE = "sums"
DESCRIPTION = "Sums of three numbers from 2 to 9, after four worked examples."
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 48
"""More than any prompt has, and than all but a few responses."""
EXAMPLES = 4
ALL = list(product(range(2, 10), repeat=3))
random.Random(0).shuffle(ALL)
PROBLEMS = len(ALL) - EXAMPLES


def question_of(terms: tuple[int, ...]) -> str:
    return f"What is {' + '.join(map(str, terms))}?"


def solution_of(terms: tuple[int, ...]) -> str:
    a, b, c = terms
    return f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}.\n#### {a + b + c}"


def rows(tests: int) -> dict[str, list[dict[str, Any]]]:
    """verl's columns, as `oar data` writes them, of `test` and `train`; no problem is in both, or an example."""
    examples = [
        {"role": role, "content": text}
        for terms in ALL[:EXAMPLES]
        for role, text in (("user", question_of(terms)), ("assistant", solution_of(terms)))
    ]
    found: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
    for index, terms in enumerate(ALL[EXAMPLES:]):
        split = "test" if index < tests else "train"
        row: dict[str, Any] = {
            "data_source": SOURCE,
            "prompt": [*examples, {"role": "user", "content": question_of(terms)}],
        }
        row |= {"ability": "math", "reward_model": {"style": "rule", "ground_truth": str(sum(terms))}}
        found[split].append(row | {"extra_info": {"index": index, "split": split}})
    return found
