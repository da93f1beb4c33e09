"""Where each data set is on the Hugging Face hub, and its rows as verl reads them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oar_plugin.runs.math.answer import final_answer

# What every prompt ends with; the reward and importance look for the box.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


_NOT_TEXT = re.compile(r"[\W_]+")


def _behind_hash(solution: Any) -> str:
    """`72` of `... <<48+24=72>>72 clips.\\n#### 72`; commas that group digits go."""
    return solution.rpartition("####")[2].strip().replace(",", "") if "####" in solution else ""


def _in_the_last_box(solution: Any) -> str:
    answer = final_answer(solution)
    return answer.text if answer is not None and answer.boxed else ""


def _text(value: Any) -> str:
    return str(value).strip()


def _without_dollars(answers: Any) -> str:
    """OlympiadBench lists the parts of an answer, most with dollars around each."""
    parts = answers if isinstance(answers, list) else [answers]
    return ", ".join(str(part).replace("$", "").strip() for part in parts)


# What DAPO's prompts say beside the problem: where to put the answer, which is not where ours says.
_DAPO_ASKS = re.compile(
    r"\ASolve the following math problem step by step\. The last line of your response .*? is the answer to the problem\.\s*"
    r'|\s*Remember to put your answer on its own line after "Answer:"\.\s*\Z',
    re.DOTALL,
)


def _dapo_question(prompt: Any) -> str:
    """Out of verl's messages, or the text that open-r1/DAPO-Math-17k-Processed has in their place."""
    return _DAPO_ASKS.sub("", str(prompt[0]["content"] if isinstance(prompt, list) else prompt)).strip()


def _dapo_answer(reward_model: Any) -> str:
    return str(reward_model["ground_truth"]).strip()


@dataclass(frozen=True)
class Source:
    """One data set."""

    hub_id: str
    question: str  # column of the problem
    answer: str  # column of the answer, or of the solution that holds it
    splits: Mapping[str, str]  # ours (`train`, `test`) to the hub's
    licence: str  # as the hub's page states it
    config: str | None = None  # None where it has one only
    read: Callable[[Any], str] = _text  # the ground truth out of the column `answer`; empty where there is none
    ask: Callable[[Any], str] = _text  # the problem out of the column `question`
    extra: tuple[str, ...] = ()  # further columns that are kept in `extra_info`


NOT_STATED = "not stated"

SOURCES: dict[str, Source] = {
    "gsm8k": Source(
        "openai/gsm8k",
        "question",
        "answer",
        {"train": "train", "test": "test"},
        "MIT",
        config="main",
        read=_behind_hash,
    ),
    # Stands in for hendrycks/competition_math, which was taken off the hub; same columns and splits.
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval",
        "problem",
        "solution",
        {"train": "train", "test": "test"},
        "MIT",
        config="default",
        read=_in_the_last_box,
        extra=("level", "type"),
    ),
    # 500 problems of MATH's test split: none of them is in `math`'s train split.
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        "problem",
        "answer",
        {"test": "test"},
        NOT_STATED,
        extra=("level", "subject", "unique_id"),
    ),
    "deepmath": Source(
        "zwhe99/DeepMath-103K", "question", "final_answer", {"train": "train"}, "MIT", extra=("difficulty", "topic")
    ),
    # The authors' file repeats each problem about a hundred times; of equal rows the first is kept.
    "dapo": Source(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "prompt",
        "reward_model",
        {"train": "train"},
        "Apache-2.0",
        read=_dapo_answer,
        ask=_dapo_question,
    ),
    "aime24": Source("HuggingFaceH4/aime_2024", "problem", "answer", {"test": "train"}, NOT_STATED),
    "aime25": Source("math-ai/aime25", "problem", "answer", {"test": "test"}, "Apache-2.0"),
    "amc23": Source("math-ai/amc23", "question", "answer", {"test": "test"}, NOT_STATED),
    "minerva": Source("math-ai/minervamath", "question", "answer", {"test": "test"}, NOT_STATED),
    # The part without pictures, in English, mathematics, open-ended; its only split is called train.
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "question",
        "final_answer",
        {"test": "train"},
        "Apache-2.0",
        config="OE_TO_maths_en_COMP",
        read=_without_dollars,
        extra=("subfield", "answer_type", "is_multiple_answer", "unit", "error"),
    ),
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
    question = source.ask(row[source.question] or "")
    if not question:
        return "no question"
    found = row[source.answer]
    ground_truth = source.read(found) if found is not None else ""
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
