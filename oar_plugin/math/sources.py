"""Where each data set is on the Hugging Face hub and how its columns are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oar_plugin.math.answer import final_answer


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
