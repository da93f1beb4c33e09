"""Rewards that fail like users' rewards, for about every ninth response. `name=` chooses one."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

from benchmarks.tiny import data


def _sometimes(fault: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(data.compute_score)
    def compute_score(data_source: str, solution_str: str, ground_truth: str, **more: Any) -> Any:
        if zlib.crc32(solution_str.encode()) % 9 == 0:
            return fault()
        return data.compute_score(data_source, solution_str, ground_truth, **more)

    return compute_score


def _raise() -> None:
    raise ZeroDivisionError("a reward that fails")


raises = _sometimes(_raise)
not_a_number = _sometimes(lambda: {"score": float("nan"), "acc": 0.0})
infinite = _sometimes(lambda: {"score": float("inf"), "acc": 0.0})
a_string = _sometimes(lambda: "right")
