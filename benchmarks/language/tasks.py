"""Problems that SmolLM2-135M solves in a third to a half of its samples at temperature 1, as rows for verl.

All sums of three numbers from 2 to 9. Four few-shot examples come before the question. Of sums with numbers up to 12 it solves
14 %, up to 20 5 %, of four numbers 12 %, of stories with two steps 15 %.
"""

import random
from itertools import product
from typing import Any

from benchmarks.language.problems import chat, row, solved_sum

SOURCE = "sums"
DESCRIPTION = "Sums of three numbers from 2 to 9, after four few-shot examples."
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 48
"""More than any prompt has, and than all but a few responses."""
EXAMPLES = 4
ALL = list(product(range(2, 10), repeat=3))
random.Random(0).shuffle(ALL)
PROBLEMS = len(ALL) - EXAMPLES


def rows(tests: int) -> dict[str, list[dict[str, Any]]]:
    """Of `test` and `train`; no problem is in both, or an example."""
    examples = [solved_sum(numbers) for numbers in ALL[:EXAMPLES]]
    found: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
    for index, numbers in enumerate(ALL[EXAMPLES:]):
        split = "test" if index < tests else "train"
        prompt = chat(examples, solved_sum(numbers)[0])
        found[split].append(row(SOURCE, prompt, sum(numbers), index=index, split=split))
    return found
