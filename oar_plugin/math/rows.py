"""Rows as verl reads them, and which rows are the same problem."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oar_plugin.math.sources import Source

# What every prompt ends with; the reward and importance look for the box.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

_NOT_TEXT = re.compile(r"[\W_]+")


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
