"""Load a data set, turn it into verl's rows, check them, and write parquet files where the recipes look for them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oar_plugin.output import write_whole
from oar_plugin.runs.math.sources import SOURCES, Source, problem_of, verl_row

if TYPE_CHECKING:
    from datasets import Dataset

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class DataError(Exception):
    """A data set that cannot be loaded or is not what it should be. The message says what to do."""


@dataclass
class Prepared:
    """What became of one split."""

    name: str
    split: str
    path: Path
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    in_evaluation: int = 0  # rows whose problem is also in an evaluation set; dropped only when that was asked for
    longest_prompt: int = 0  # characters
    unreadable: list[str] = field(default_factory=list)  # ground truths that math-verify cannot read as mathematics


def prepare(
    names: Sequence[str],
    out: Path,
    local: Path | None,
    limit: int | None,
    decontaminate: bool,
    progress: Progress,
    repeats: Mapping[str, int] = MappingProxyType({}),
) -> list[Prepared]:
    """Write `out/NAME/train.parquet` and `out/NAME/test.parquet`, as far as a data set has these splits.

    Args:
        local: a copy to use instead of the hub: a file or folder, or for several names a folder with one for each.
        limit: rows of a split to take, from its beginning; all when None.
        decontaminate: drop training rows whose problem is in an evaluation set of `out`, not only count them.
        repeats: how often each row of a set's test file stands there, by name; once where it is not given.
    """
    splits = [(name, split) for name in dict.fromkeys(names) for split in SOURCES[name].splits]
    splits.sort(key=lambda pair: pair[1])  # test before train: what is trained on is compared with what is tested on
    done: list[Prepared] = []
    for name, split in splits:
        dataset = load(name, split, _copy_of(name, local, len(set(names)) > 1), limit)
        prepared = Prepared(name, split, out / name / f"{split}.parquet")
        rows = _convert(prepared, dataset, progress)
        if split == "train":
            evaluated = _evaluation_problems(out)
            clean = [row for row in rows if problem_of(row) not in evaluated]
            prepared.in_evaluation = len(rows) - len(clean)
            if decontaminate and prepared.in_evaluation:
                rows, prepared.dropped["in an evaluation set"] = clean, prepared.in_evaluation
        if not rows:
            reasons = ", ".join(f"{count} with {reason}" for reason, count in prepared.dropped.items())
            raise DataError(f"{name} ({split}): no row is left ({reasons or 'it is empty'})")
        prepared.unreadable = _unreadable((row["reward_model"]["ground_truth"] for row in rows), name, progress)
        prepared.rows = len(rows)
        prepared.longest_prompt = max(len(row["prompt"][0]["content"]) for row in rows)
        _write(prepared.path, rows * (repeats.get(name, 1) if split == "test" else 1))
        done.append(prepared)
    return done


def load(name: str, split: str, local: Path | None, limit: int | None) -> Dataset:
    """One split of a data set, from the hub or from a copy."""
    import datasets

    source = SOURCES[name]
    wanted = source.splits[split]
    try:
        if local is None:
            dataset = datasets.load_dataset(source.hub_id, source.config, split=wanted)
        elif local.is_dir():
            configs = datasets.get_dataset_config_names(str(local))
            config = source.config if source.config in configs else None
            dataset = datasets.load_dataset(str(local), config, split=wanted)
        else:
            dataset = datasets.load_dataset(_FORMATS[local.suffix], data_files={wanted: str(local)}, split=wanted)
    except Exception as error:  # the library's own, the hub client's, and those of two HTTP clients
        raise DataError(_advice(name, source, local, error)) from error
    missing = {source.question, source.answer} - set(dataset.column_names)
    if missing:
        raise DataError(
            f"{name}: {local or source.hub_id} has no column {' or '.join(sorted(missing))} (it has "
            f"{', '.join(dataset.column_names)}): it must have the columns of {source.hub_id}"
        )
    columns = (source.question, source.answer, *source.extra)
    dataset = dataset.select_columns([column for column in columns if column in dataset.column_names])
    return dataset.select(range(min(limit, len(dataset)))) if limit is not None else dataset


def _copy_of(name: str, local: Path | None, several: bool) -> Path | None:
    """Where the copy of one data set is."""
    if local is None:
        return None
    splits = SOURCES[name].splits
    if not local.exists():
        raise DataError(f"--from {local}: does not exist")
    if several and not (local / name).is_dir():
        raise DataError(f"--from {local}: for several data sets it must hold one folder for each; no {name} in it")
    if local.is_file() and local.suffix not in _FORMATS:
        raise DataError(f"--from {local}: a file must end in {', '.join(_FORMATS)}")
    if local.is_file() and len(splits) > 1:
        both = " and ".join(f"{split}{local.suffix}" for split in splits)
        raise DataError(f"--from {local}: {name} has several splits, so name a folder that holds both: {both}")
    return local / name if several else local


def _advice(name: str, source: Source, local: Path | None, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if local is not None:
        return f"{name}: cannot read {local}: {reason}"
    return (
        f"{name}: cannot load {source.hub_id} from the Hugging Face hub: {reason}\n"
        "If this machine reaches the hub through a mirror, name it in HF_ENDPOINT. If it has no network, run the same command "
        f"where there is one and copy the files it writes, or fetch a copy there (hf download --repo-type dataset "
        f"{source.hub_id} --local-dir {name}) and use it with --from {name}. HF_HUB_OFFLINE=1 uses only what was loaded before."
    )


def _convert(prepared: Prepared, dataset: Iterable[Any], progress: Progress) -> list[dict[str, Any]]:
    source, total = SOURCES[prepared.name], len(dataset)  # type: ignore[arg-type]
    rows, known = [], set()
    for index, raw in enumerate(dataset):
        same = str((raw[source.question], raw[source.answer]))
        row = "a copy of another" if same in known else verl_row(prepared.name, source, prepared.split, index, raw)
        known.add(same)
        if isinstance(row, str):
            prepared.dropped[row] += 1
        else:
            rows.append(row)
        if index % 1000 == 0 or index + 1 == total:
            progress(f"{prepared.name} {prepared.split}: rows", index + 1, total)
    return rows


def _evaluation_problems(out: Path) -> set[str]:
    import pyarrow.parquet as pq

    files = [out / name / "test.parquet" for name in SOURCES]
    return {
        problem_of(row)
        for file in files
        if file.is_file()
        for row in pq.read_table(file, columns=["prompt"]).to_pylist()
    }


def _unreadable(ground_truths: Iterable[str], name: str, progress: Progress) -> list[str]:
    """Those that math-verify does not read as mathematics; each once, however many rows have it."""
    from oar_plugin.runs.math.answer import is_expression, warm_up
    from oar_plugin.runs.math.pool import GuardedPool, TaskCrashed, TaskTimedOut

    doubtful = [text for text in dict.fromkeys(ground_truths) if not _PLAIN_NUMBER.fullmatch(text)]
    if not doubtful:
        return []
    processes = min(16, os.cpu_count() or 1, 1 + len(doubtful) // 500)
    pool = GuardedPool(processes, timeout_s=5.0, warm_up=warm_up)

    def readable(text: str) -> bool:
        try:
            return pool.run(is_expression, text)
        except (TaskTimedOut, TaskCrashed):
            return False

    unreadable = []
    try:
        with ThreadPoolExecutor(processes) as threads:
            for index, (text, fine) in enumerate(zip(doubtful, threads.map(readable, doubtful), strict=True)):
                if not fine:
                    unreadable.append(text)
                progress(f"{name}: answers that are no plain numbers", index + 1, len(doubtful))
    finally:
        pool.close()
    return unreadable


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    try:
        write_whole(path, sink.getvalue().to_pybytes())
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}: choose another place with --out") from error
