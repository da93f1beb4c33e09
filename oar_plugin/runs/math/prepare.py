"""Loads data sets, converts them to verl's rows, checks them, and writes parquet files where recipes expect them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oar_plugin.output import write_whole
from oar_plugin.runs.evaluate.problems import reason
from oar_plugin.runs.math.sources import SOURCES, problem_of, verl_row

if TYPE_CHECKING:
    from datasets import Dataset


class DataError(Exception):
    """A data set cannot be loaded or written, or lacks columns. The message says what to do."""


@dataclass
class Prepared:
    """One split that was written."""

    name: str
    split: str
    path: Path
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows
    in_evaluation: int = 0  # rows whose problem is also in an evaluation set; kept unless `decontaminate`


def prepare(
    names: Sequence[str],
    out: Path,
    local: Path | None,
    decontaminate: bool,
    repeats: Mapping[str, int] = MappingProxyType({}),
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
        return f"{name}: cannot read {local}: {reason(error)}"
    return (
        f"{name}: cannot load {hub_id} from the Hugging Face hub: {reason(error)}\n"
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
