"""The data sets: their places on the Hugging Face hub, and the conversion of their rows to verl's columns."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oar_plugin.runs.math.answer import final_answer

# Appended to every prompt; reward and importance look for the box.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
NOT_STATED = "not stated"
_NOT_TEXT = re.compile(r"[\W_]+")
# DAPO's own instruction asks for the answer after "Answer:"; it is removed, because `INSTRUCTION` asks for a box.
_DAPO_ASKS = re.compile(
    r"\ASolve the following math problem step by step\. The last line of your response .*? is the answer to the problem\.\s*"
    r'|\s*Remember to put your answer on its own line after "Answer:"\.\s*\Z',
    re.DOTALL,
)


def _text(value: Any) -> str:
    return str(value).strip()


def _after_hash(solution: Any) -> str:
    """Return `72` of `... <<48+24=72>>72 clips.\\n#### 72`, without the commas that group digits."""
    return solution.rpartition("####")[2].strip().replace(",", "") if "####" in solution else ""


def _in_the_last_box(solution: Any) -> str:
    answer = final_answer(solution)
    return answer.text if answer is not None and answer.boxed else ""


def _without_dollars(answers: Any) -> str:
    """Return the parts of an answer, joined by commas. OlympiadBench lists them, most of them between dollar signs."""
    parts = answers if isinstance(answers, list) else [answers]
    return ", ".join(str(part).replace("$", "").strip() for part in parts)


def _dapo_question(prompt: Any) -> str:
    """Return the problem from chat messages; open-r1/DAPO-Math-17k-Processed has a string instead of messages."""
    return _DAPO_ASKS.sub("", str(prompt[0]["content"] if isinstance(prompt, list) else prompt)).strip()


def _dapo_answer(reward_model: Any) -> str:
    return _text(reward_model["ground_truth"])


@dataclass(frozen=True)
class Source:
    """One data set on the hub."""

    hub_id: str
    question: str  # name of the problem's column
    answer: str  # name of the column with the answer, or with the solution that contains it
    splits: Mapping[str, str]  # split (`train`, `test`) -> its name on the hub
    licence: str  # as the hub's page states it
    config: str | None = None  # None if the data set has only one
    read: Callable[[Any], str] = _text  # value of `answer` -> ground truth; empty if there is none
    ask: Callable[[Any], str] = _text  # value of `question` -> problem


_BOTH, _TRAIN, _TEST = {"train": "train", "test": "test"}, {"train": "train"}, {"test": "test"}
_TEST_CALLED_TRAIN = {"test": "train"}

SOURCES: dict[str, Source] = {
    "gsm8k": Source("openai/gsm8k", "question", "answer", _BOTH, "MIT", "main", _after_hash),
    # Replaces hendrycks/competition_math, which was removed from the hub; same columns and splits.
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval", "problem", "solution", _BOTH, "MIT", "default", _in_the_last_box
    ),
    # 500 problems from MATH's test split; none of them is in the train split of `math`.
    "math500": Source("HuggingFaceH4/MATH-500", "problem", "answer", _TEST, NOT_STATED),
    "deepmath": Source("zwhe99/DeepMath-103K", "question", "final_answer", _TRAIN, "MIT"),
    # The authors' file repeats each problem about a hundred times; only the first of equal rows is kept.
    "dapo": Source(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "prompt",
        "reward_model",
        _TRAIN,
        "Apache-2.0",
        read=_dapo_answer,
        ask=_dapo_question,
    ),
    "aime24": Source("HuggingFaceH4/aime_2024", "problem", "answer", _TEST_CALLED_TRAIN, NOT_STATED),
    "aime25": Source("math-ai/aime25", "problem", "answer", _TEST, "Apache-2.0"),
    "amc23": Source("math-ai/amc23", "question", "answer", _TEST, NOT_STATED),
    "minerva": Source("math-ai/minervamath", "question", "answer", _TEST, NOT_STATED),
    # The part in English, on mathematics, without pictures, with final answers.
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "question",
        "final_answer",
        _TEST_CALLED_TRAIN,
        "Apache-2.0",
        "OE_TO_maths_en_COMP",
        _without_dollars,
    ),
}


def verl_row(name: str, split: str, index: int, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return a row of the hub in verl's columns; if it cannot be used, the reason: `no question` or `no answer`.

    Args:
        name: the data set's name; also verl's `data_source`, by which validation metrics are grouped.
        split: `train` or `test`.
        index: the row's index in the hub's split.
        row: column of the hub -> value.
    """
    source = SOURCES[name]
    question = source.ask(row[source.question] or "")
    if not question:
        return "no question"
    answer = row[source.answer]
    ground_truth = source.read(answer) if answer is not None else ""
    if not ground_truth:
        return "no answer"
    return {
        "data_source": name,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split},
    }


def problem_of(row: Mapping[str, Any]) -> str:
    """Return the problem's letters and digits in lower case, so that two typesettings of a problem compare equal."""
    return _NOT_TEXT.sub("", row["prompt"][0]["content"].removesuffix(INSTRUCTION)).lower()
