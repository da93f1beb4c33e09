"""Reads problems, and converts data sets from the Hugging Face hub to parquet files with verl's columns, for the recipes."""

import os
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from oar_plugin.credit.answer import make_finder
from oar_plugin.output import cause, write_whole
from oar_plugin.page.record import fault_in

# Appended to every prompt; reward and importance look for the box.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
Row = TypeVar("Row")


class Source(NamedTuple):
    hub_id: str
    licence: str  # as the hub's page states it
    splits: Mapping[str, str]  # split (`train`, `test`) -> its name on the hub
    question: str  # name of the problem's column
    answer: str  # name of the column with the answer, or with the solution that contains it
    read: Callable[[str], str]  # text of `answer` -> ground truth; empty if there is none
    config: str | None = None  # None if the data set has only one
    listed: bool = False  # whether `answer` lists parts, which the ground truth joins


_find_box = make_finder(("boxed",))
_READ: dict[str, Callable[[str], str]] = {
    "box": lambda solution: solution[span.start : span.end] if (span := _find_box(solution)) else "",
    "hash": lambda solution: solution.partition("####")[2].replace(",", ""),  # commas group digits: `#### 1,072`
    "no_dollars": lambda text: text.replace("$", ""),
    "text": str,
}
_SETS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SOURCES = {name: Source(**{**of, "read": _READ[of.get("read", "text")]}) for name, of in _SETS.items()}


class DataError(ValueError):
    """A file or a data set cannot be read, or no row of it can be used. The message says what to do."""


def data_folder() -> Path:
    """Return the folder in which recipes look for their files: OAR_DATA, or ~/data/oar without it. OSError: there is no ~."""
    folder = Path(os.environ.get("OAR_DATA") or os.path.expanduser("~/data/oar"))
    if "OAR_DATA" not in os.environ and not folder.parents[1].is_dir():
        home = f"no home folder (HOME={os.environ.get('HOME')})"
        raise FileNotFoundError(f"{folder}: {home}; OAR_DATA names another place")
    return folder


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

    source, config, wanted = SOURCES[name], SOURCES[name].config, SOURCES[name].splits[split]
    place = source.hub_id if local is None else str(local / name if (local / name).is_dir() else local)
    advice = f"HF_ENDPOINT sets a mirror, and --from reads a copy (hf download --repo-type dataset {source.hub_id})"
    try:
        if local is not None:
            advice = f"needed: the split {wanted}, with columns {source.question} and {source.answer}"
            for file in Path(place).rglob("*.json*"):  # datasets does not name the line that is wrong
                if file.suffix == ".jsonl" or not file.stat().st_size:
                    rows_of(file, dict)
            config = config if config in datasets.get_dataset_config_names(place) else None
            wanted = wanted if wanted in datasets.get_dataset_split_names(place, config) else split
        dataset = datasets.load_dataset(place, config, split=wanted)
        return dataset.select_columns([source.question, source.answer]).to_list()
    except Exception as error:  # raised by datasets, the hub's client, or two HTTP clients
        raise DataError(f"{name}: cannot read {place}: {cause(error)}; {advice}") from error


def verl_row(name: str, split: str, index: int, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return row `index` in verl's columns, or None if it lacks a question or answer. Raise DataError if one is not text."""
    source = SOURCES[name]
    question, answer = raw[source.question] or "", raw[source.answer]
    parts = answer if source.listed and isinstance(answer, list) else [answer]
    try:
        # A number is the answer itself, also where other rows have solutions.
        truths = [source.read(part) if isinstance(part, str) else text_of(part) for part in parts]
        messages = messages_of(question) if str(question).strip() else []
    except ValueError as error:
        raise DataError(f"{name} ({split}), row {index + 1}: {error}; here {raw!r:.200}") from None
    ground_truth = ", ".join(filter(None, map(str.strip, truths)))
    if not messages or not ground_truth:
        return None
    asking = next(message for message in reversed(messages) if message["role"] == "user")
    asking["content"] = f"{asking['content'].strip()} {INSTRUCTION}"
    return {
        "data_source": name,  # by which verl groups validation metrics
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split},
    }


def rows_of(file: Path, kind: type[Row]) -> list[tuple[int, Row]]:
    """Return number and content of rows of parquet or lines of JSON, without nulls. Raise DataError if one is no `kind`."""
    if is_table := file.suffix == ".parquet":
        from pyarrow.parquet import read_table
    rows, of_any, of_kind = list[tuple[int, Row]](), TypeAdapter(dict[str, Any]), TypeAdapter(kind)
    lines = read_table(file).to_pylist() if is_table else file.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            if is_table or line.strip():
                given = line if is_table else of_any.validate_json(line)
                known = {column: value for column, value in given.items() if value is not None}
                rows.append((number, of_kind.validate_python(known)))
        except ValidationError as error:
            raise DataError(f"{file}, {'row' if is_table else 'line'} {number}: {fault_in(error)}") from None
    if not rows:
        raise DataError(f"{file}: holds no row")
    return rows


def text_of(value: object) -> str:
    """Return a text, or a number as a text; empty for None and NaN. ValueError: it is something else."""
    if not isinstance(value, str | Number | None):
        raise ValueError("allowed: texts and numbers")
    return "" if value is None or value != value else str(value)


def truth_of(value: object) -> str | list[str]:
    """Return a right answer as a text, or a list of such answers as texts. ValueError: there is none."""
    texts = [text_of(part).strip() for part in (value if isinstance(value, list) else [value])]
    if not texts or not all(texts):
        raise ValueError("allowed: a text, a number, or a list of them, none of them empty")
    return texts if isinstance(value, list) else texts[0]


def messages_of(prompt: object) -> list[dict[str, Any]]:
    """Return a prompt as messages of texts: a text is a user's, parts are joined. ValueError: no user asks, or an image."""
    messages = []
    for turn in prompt if isinstance(prompt, list) else [prompt]:
        message = turn if isinstance(turn, dict) else {"role": "user", "content": turn}
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
        messages.append({**message, "role": message.get("role") or "user", "content": "".join(map(text_of, parts))})
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("allowed: a text, or messages with role and content, one of them a user's")
    return messages
