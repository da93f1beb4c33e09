"""Converts data sets from the Hugging Face hub to parquet files with verl's columns, in the recipes' data folder."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oar_plugin.credit.answer import make_finder
from oar_plugin.output import cause, write_whole

# Appended to every prompt; reward and importance look for the box.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


class Source(NamedTuple):
    hub_id: str
    licence: str  # as the hub's page states it
    splits: Mapping[str, str]  # split (`train`, `test`) -> its name on the hub
    question: str  # name of the problem's column
    answer: str  # name of the column with the answer, or with the solution that contains it
    read: Callable[[Any], str] = str  # value of `answer` -> ground truth; empty if there is none
    config: str | None = None  # None if the data set has only one


def _in_the_last_box(solution: str) -> str:
    span = make_finder(("boxed",))(solution)
    return solution[span.start : span.end] if span else ""


def _after_hash(solution: str) -> str:
    """Return `72` of `... <<48+24=72>>72 clips.\\n#### 72`, without the commas that group digits."""
    return solution.partition("####")[2].replace(",", "")


def _without_dollars(answers: list[str]) -> str:
    """Return the parts of an answer, joined by commas. OlympiadBench lists them, most of them between dollar signs."""
    return ", ".join(part.replace("$", "").strip() for part in answers)


_BOTH, _TRAIN, _TEST = {"train": "train", "test": "test"}, {"train": "train"}, {"test": "test"}
_AS_TRAIN, _ENGLISH = {"test": "train"}, "OE_TO_maths_en_COMP"  # on mathematics, without pictures, with final answers

SOURCES: dict[str, Source] = {
    "gsm8k": Source("openai/gsm8k", "MIT", _BOTH, "question", "answer", _after_hash, "main"),
    # Replaces hendrycks/competition_math, which was removed from the hub; same columns and splits.
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval", "MIT", _BOTH, "problem", "solution", _in_the_last_box, "default"
    ),
    # 500 problems from MATH's test split; none of them is in the train split of `math`.
    "math500": Source("HuggingFaceH4/MATH-500", "not stated", _TEST, "problem", "answer"),
    "deepmath": Source("zwhe99/DeepMath-103K", "MIT", _TRAIN, "question", "final_answer"),
    "aime24": Source("HuggingFaceH4/aime_2024", "not stated", _AS_TRAIN, "problem", "answer"),
    "aime25": Source("math-ai/aime25", "Apache-2.0", _TEST, "problem", "answer"),
    "amc23": Source("math-ai/amc23", "not stated", _TEST, "question", "answer"),
    "minerva": Source("math-ai/minervamath", "not stated", _TEST, "question", "answer"),
    "olympiadbench": Source(
        *("Hothan/OlympiadBench", "Apache-2.0", _AS_TRAIN, "question", "final_answer", _without_dollars, _ENGLISH)
    ),
}


class DataError(Exception):
    """A data set cannot be loaded, or no row of it can be used. The message says what to do."""


def data_folder() -> Path:
    """Return the folder in which recipes look for their files: OAR_DATA, or ~/data/oar without it."""
    return Path(os.environ.get("OAR_DATA") or Path.home() / "data" / "oar")


def prepare(name: str, split: str, out: Path, local: Path | None) -> str:
    """Write `out/NAME/SPLIT.parquet` with equal rows once and none without question or answer; return how many are left.

    `local`: a copy of the hub's repository, or a folder with a copy NAME of each. Raise DataError if no row is left.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    given, unique = load(name, split, local), dict[str, tuple[int, dict[str, Any]]]()
    for index, raw in enumerate(given):
        unique.setdefault(str(raw), (index, raw))
    rows = [row for index, raw in unique.values() if (row := verl_row(name, split, index, raw))]
    if not rows:
        raise DataError(f"{name} ({split}): no row of {len(given)} has a question and an answer")
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    write_whole(out / name / f"{split}.parquet", buffer.getvalue().to_pybytes())
    return f"{len(rows)} rows of {len(given)}"


def load(name: str, split: str, local: Path | None) -> list[dict[str, Any]]:
    """Return questions and answers of one split, from the hub or a copy. Raise DataError if they cannot be loaded."""
    import datasets

    source, config = SOURCES[name], SOURCES[name].config
    place = source.hub_id if local is None else str(local / name if (local / name).is_dir() else local)
    try:
        if local is not None and config not in datasets.get_dataset_config_names(place):
            config = None
        dataset = datasets.load_dataset(place, config, split=source.splits[split])
        return dataset.select_columns([source.question, source.answer]).to_list()
    except Exception as error:  # raised by datasets, the hub's client, or two HTTP clients
        advice = f"HF_ENDPOINT sets a mirror, and --from reads a copy (hf download --repo-type dataset {source.hub_id})"
        raise DataError(f"{name}: cannot read {place}: {cause(error)}; {advice}") from error


def verl_row(name: str, split: str, index: int, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return row number `index` of the hub's split in verl's columns, or None if it lacks a question or answer."""
    source = SOURCES[name]
    question, answer = raw[source.question] or "", raw[source.answer]
    ground_truth = source.read(answer).strip() if answer is not None else ""
    if not question.strip() or not ground_truth:
        return None
    return {
        "data_source": name,  # by which verl groups validation metrics
        "prompt": [{"role": "user", "content": f"{question.strip()} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split},
    }
