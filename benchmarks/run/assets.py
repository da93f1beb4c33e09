"""What a measured run of verl works on: prompts of an exact length, a reward, an answer finder; and whose step is whose.

verl's processes import this, so it imports little.
"""

from itertools import count
from typing import Any

FINDER, REWARD = f"python:{__name__}:find_answer", f"pkg://{__name__}"
SIGNAL, NO_SIGNAL = "alternate", "equal"
ANSWER_CHARACTERS = 8 * 4

ORDER = "goog"
"""Whose steps they are, GRPO's or OAR's, repeated. Each pair of steps has one of each, and who is first alternates."""
METHOD = "bench/oar"  # 1 in an OAR step, 0 in a GRPO step

_calls: dict[int, count] = {}


def is_oar(step: int) -> bool:
    """Whether that step, counted from 1, is OAR's."""
    return ORDER[(step - 1) % len(ORDER)] == "o"


def find_answer(text: str) -> tuple[int, int] | None:
    """The last words of a response, whatever they say: a model with random weights writes no answers.

    That is eight tokens of four letters. The tokenizer's real words and single bytes, 1 % of a vocabulary of 32,000 and 7 %
    of one of 4,096, have other lengths: where the model wrote one among the last, the answer is a token longer or shorter.
    """
    return (max(0, len(text) - ANSWER_CHARACTERS), len(text)) if text else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any
) -> dict[str, float]:
    """0, 1, 0, 1 ... over the responses of a prompt with a signal; 0 for all responses of a prompt without one.

    Nothing depends on the text, so that each step has the same number of rows with an advantage. Counts calls, and so needs
    one reward worker (`cpu_overrides` has one); its threads share the counters, whose operations are atomic.
    """
    if ground_truth == NO_SIGNAL:
        return {"score": 0.0}
    return {"score": float(next(_calls.setdefault(extra_info["index"], count())) % 2)}


def prompt_rows(steps: int, prompts: int, with_signal: int, length: int) -> list[dict[str, Any]]:
    """verl's columns: `prompts` a step, of which `with_signal`, spread evenly, have responses with unequal rewards.

    No prompt stands there twice, so that no step finds another's prefix in a cache. Each has `length` tokens, a digit each.
    """
    places = [(place + 1) * with_signal // prompts > place * with_signal // prompts for place in range(prompts)]
    return [
        {
            "data_source": "benchmarks_run",
            "prompt": [{"role": "user", "content": f"{index:0{length}d}"}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": SIGNAL if places[index % prompts] else NO_SIGNAL},
            "extra_info": {"index": index},
        }
        for index in range(steps * prompts)
    ]
