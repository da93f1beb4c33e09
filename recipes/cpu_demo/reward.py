"""The reward of the demo's task, in the form that verl's ``reward.custom_reward_function`` expects."""

from __future__ import annotations

from typing import Any

from recipes.cpu_demo.task import is_right


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """1 when the text behind ``####`` is the right answer, else 0."""
    right = float(is_right(solution_str.replace("<|im_end|>", ""), ground_truth))
    return {"score": right, "acc": right}
