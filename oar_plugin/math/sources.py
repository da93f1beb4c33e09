"""Where each data set is on the Hugging Face hub, and its rows as verl reads them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oar_plugin.math.answer import final_answer

# What every prompt ends with; the reward and importance look for the box.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

_NOT_TEXT = re.compile(r"[\W_]+")


def _behind_hash(solution: str) -> str:
    """`72` of `... <<48+24=72>>72 clips.\\n#### 72`; commas that group digits go."""
    return solution.rpartition("####")[2].strip().replace(",", "") if "####" in solution else ""


def _in_the_last_box(solution: str) -> str:
    answer = final_answer(solution)
    return answer.text if answer is not None and answer.boxed else ""


@dataclass(frozen=True)
class Source:
    """One data set."""

    hub_id: str
    question: str  # column of the problem
    answer: str  # column of the answer, or of the solution that holds it
    splits: Mapping[str, str]  # ours (`train`, `test`) to the hub's
    config: str | None = None  # None where it has one only
    read: Callable[[str], str] = str.strip  # the ground truth out of the column `answer`; empty where there is none
    extra: tuple[str, ...] = ()  # further columns that are kept in `extra_info`


SOURCES: dict[str, Source] = {
    "gsm8k": Source(
        "openai/gsm8k", "question", "answer", {"train": "train", "test": "test"}, config="main", read=_behind_hash
    ),
    # Stands in for hendrycks/competition_math, which was taken off the hub; same columns and splits.
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval",
        "problem",
        "solution",
        {"train": "train", "test": "test"},
        config="default",
        read=_in_the_last_box,
        extra=("level", "type"),
    ),
    # 500 problems of MATH's test split: none of them is in `math`'s train split.
    "math500": Source(
        "HuggingFaceH4/MATH-500", "problem", "answer", {"test": "test"}, extra=("level", "subject", "unique_id")
    ),
    "deepmath": Source(
        "zwhe99/DeepMath-103K", "question", "final_answer", {"train": "train"}, extra=("difficulty", "topic")
    ),
    "aime24": Source("HuggingFaceH4/aime_2024", "problem", "answer", {"test": "train"}),
    "aime25": Source("math-ai/aime25", "problem", "answer", {"test": "test"}),
    "amc23": Source("math-ai/amc23", "question", "answer", {"test": "test"}),
}


def verl_row(name: str, source: Source, split: str, index: int, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """One row of the hub in verl's columns, or why there can be none: `no question`, `no answer`.

    Args:
        name: of the data set, verl's `data_source`, under which validation metrics are grouped.
        source: how to read the row.
        split: `train` or `test`.
        index: of the row in the hub's split.
        row: its columns.
    """
    question = str(row[source.question] or "").strip()
    if not question:
        return "no question"
    found = row[source.answer]
    ground_truth = source.read(str(found)) if found is not None else ""
    if not ground_truth:
        return "no answer"
    return {
        "data_source": name,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split, **{key: str(row[key]) for key in source.extra if key in row}},
    }


def problem_of(row: Mapping[str, Any]) -> str:
    """The same for two rows that ask the same: their letters and digits, without case, punctuation and LaTeX's signs."""
    return _NOT_TEXT.sub("", row["prompt"][0]["content"].removesuffix(INSTRUCTION)).lower()
