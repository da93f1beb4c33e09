"""Converts data sets from the Hugging Face hub to parquet files with verl's columns, in the recipes' data folder."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oar_plugin.output import cause, write_whole
from oar_plugin.runs.math.answer import final_answer

if TYPE_CHECKING:
    from datasets import Dataset

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


def data_folder() -> Path:
    """Return the folder in which recipes look for their files: OAR_DATA, or ~/data/oar without it."""
    return Path(os.environ.get("OAR_DATA") or Path.home() / "data" / "oar")


@dataclass(frozen=True)
class Source:
    hub_id: str
    question: str  # name of the problem's column
    answer: str  # name of the column with the answer, or with the solution that contains it
    splits: Mapping[str, str]  # split (`train`, `test`) -> its name on the hub
    licence: str  # as the hub's page states it
    read: Callable[[Any], str] = _text  # value of `answer` -> ground truth; empty if there is none
    ask: Callable[[Any], str] = _text  # value of `question` -> problem
    config: str | None = None  # None if the data set has only one


_BOTH, _TRAIN, _TEST = {"train": "train", "test": "test"}, {"train": "train"}, {"test": "test"}
_AS_TRAIN = {"test": "train"}  # the hub calls the test split `train`

SOURCES: dict[str, Source] = {
    "gsm8k": Source("openai/gsm8k", "question", "answer", _BOTH, "MIT", _after_hash, config="main"),
    # Replaces hendrycks/competition_math, which was removed from the hub; same columns and splits.
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval", "problem", "solution", _BOTH, "MIT", _in_the_last_box, config="default"
    ),
    # 500 problems from MATH's test split; none of them is in the train split of `math`.
    "math500": Source("HuggingFaceH4/MATH-500", "problem", "answer", _TEST, NOT_STATED),
    "deepmath": Source("zwhe99/DeepMath-103K", "question", "final_answer", _TRAIN, "MIT"),
    # The authors' file repeats each problem about a hundred times; only the first of equal rows is kept.
    "dapo": Source(
        *("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model", _TRAIN, "Apache-2.0"),
        *(lambda reward_model: _text(reward_model["ground_truth"]), _dapo_question),
    ),
    "aime24": Source("HuggingFaceH4/aime_2024", "problem", "answer", _AS_TRAIN, NOT_STATED),
    "aime25": Source("math-ai/aime25", "problem", "answer", _TEST, "Apache-2.0"),
    "amc23": Source("math-ai/amc23", "question", "answer", _TEST, NOT_STATED),
    "minerva": Source("math-ai/minervamath", "question", "answer", _TEST, NOT_STATED),
    # The part in English, on mathematics, without pictures, with final answers.
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "question",
        "final_answer",
        _AS_TRAIN,
        "Apache-2.0",
        _without_dollars,
        config="OE_TO_maths_en_COMP",
    ),
}


def verl_row(name: str, split: str, index: int, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return row number `index` of the hub's split in verl's columns; if it cannot be used, `no question` or `no answer`.

    The data set's name becomes verl's `data_source`, by which validation metrics are grouped.
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
    """Return the problem's letters and digits in lower case, so that two layouts of a problem give the same text."""
    return _NOT_TEXT.sub("", row["prompt"][0]["content"].removesuffix(INSTRUCTION)).lower()


class DataError(Exception):
    """A data set cannot be loaded or written, or lacks columns. The message says what to do."""


@dataclass
class Prepared:
    name: str
    split: str
    path: Path
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows
    in_evaluation: int = 0  # rows whose problem is also in an evaluation set; kept unless `decontaminate`


def prepare(
    names: Sequence[str], out: Path, local: Path | None, decontaminate: bool, repeats: Mapping[str, int]
) -> list[Prepared]:
    """Write `out/NAME/SPLIT.parquet` for each split (`train`, `test`) of the named data sets.

    Args:
        local: folder with a copy that replaces the hub; for several names, a folder with one such folder per name.
        decontaminate: drop training rows whose problem is in an evaluation set of `out`; if False, only count them.
        repeats: data set -> how many times each row of its test file is written; default once.

    Raise DataError if a set cannot be loaded or written, lacks columns, or has no row left.
    """
    splits = [(name, split) for name in dict.fromkeys(names) for split in SOURCES[name].splits]
    splits.sort(key=lambda pair: pair[1])  # test first: train rows are compared with the test files
    done: list[Prepared] = []
    for name, split in splits:
        dataset = load(name, split, _copy_of(name, local, len(set(names)) > 1))
        prepared = Prepared(name, split, out / name / f"{split}.parquet")
        rows = _convert(prepared, dataset)
        if split == "train":
            evaluated = _evaluation_problems(out)
            clean = [row for row in rows if problem_of(row) not in evaluated]
            prepared.in_evaluation = len(rows) - len(clean)
            if decontaminate and prepared.in_evaluation:
                rows, prepared.dropped["in an evaluation set"] = clean, prepared.in_evaluation
        if not rows:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in prepared.dropped.items())
            raise DataError(f"{name} ({split}): no row is left ({reasons or 'it is empty'})")
        prepared.rows = len(rows)
        _write(prepared.path, rows * (repeats.get(name, 1) if split == "test" else 1))
        done.append(prepared)
    return done


def load(name: str, split: str, local: Path | None) -> Dataset:
    """Return one split of a data set, from the hub or from a copy. Raise DataError if it cannot be loaded or lacks columns."""
    import datasets

    source = SOURCES[name]
    hub_split = source.splits[split]
    try:
        if local is None:
            dataset = datasets.load_dataset(source.hub_id, source.config, split=hub_split)
        else:
            config = source.config if source.config in datasets.get_dataset_config_names(str(local)) else None
            dataset = datasets.load_dataset(str(local), config, split=hub_split)
    except Exception as error:  # raised by datasets, the hub's client, or two HTTP clients
        raise DataError(_advice(name, local, error)) from error
    columns = [source.question, source.answer]
    missing = {*columns} - set(dataset.column_names)
    if missing:
        raise DataError(
            f"{name}: {local or source.hub_id} has no column {' or '.join(sorted(missing))}, only "
            f"{', '.join(dataset.column_names)}; a copy must have the columns of {source.hub_id}"
        )
    return dataset.select_columns(columns)


def _copy_of(name: str, local: Path | None, several: bool) -> Path | None:
    """Return the folder with the copy of one data set; None without `local`. Raise DataError if it is missing."""
    copy = local / name if local is not None and several else local
    if copy is not None and not copy.is_dir():
        rule = f"must contain a folder per data set; {name} is missing" if several else "is not a folder"
        raise DataError(f"--from {local}: {rule}")
    return copy


def _advice(name: str, local: Path | None, error: Exception) -> str:
    hub_id = SOURCES[name].hub_id
    if local is not None:
        return f"{name}: cannot read {local}: {cause(error)}"
    return (
        f"{name}: cannot load {hub_id} from the Hugging Face hub: {cause(error)}\n"
        "To use a mirror of the hub, set HF_ENDPOINT. Without a network here, run this command on another machine and copy the "
        f"files that it writes, or download a copy there (hf download --repo-type dataset {hub_id} --local-dir {name}) and use "
        f"it with --from {name}. HF_HUB_OFFLINE=1 uses only earlier downloads."
    )


def _convert(prepared: Prepared, dataset: Dataset) -> list[dict[str, Any]]:
    """Return rows in verl's columns, and count the dropped rows in `prepared.dropped`."""
    source, rows, seen = SOURCES[prepared.name], [], set()
    for index, raw in enumerate(dataset):
        key = str((raw[source.question], raw[source.answer]))
        row = "a copy of another" if key in seen else verl_row(prepared.name, prepared.split, index, raw)
        seen.add(key)
        if isinstance(row, str):
            prepared.dropped[row] += 1
        else:
            rows.append(row)
    return rows


def _evaluation_problems(out: Path) -> set[str]:
    import pyarrow.parquet as pq

    files = [file for name in SOURCES if (file := out / name / "test.parquet").is_file()]
    return {problem_of(row) for file in files for row in pq.read_table(file, columns=["prompt"]).to_pylist()}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    try:
        write_whole(path, sink.getvalue().to_pybytes())
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}: choose another place with --out") from error
