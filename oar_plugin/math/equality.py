"""Comparing answers with math-verify. Runs in the processes of a `pool`: some expressions take for ever or all memory."""

from __future__ import annotations

import functools
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oar_plugin.math.answer import FinalAnswer


class Verdict(Enum):
    """Outcome of a comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNPARSED = "unparsed"  # the answer holds nothing that math-verify can read


def compare(ground_truth: str, answer: FinalAnswer) -> Verdict:
    """Whether an answer means the same as the ground truth, according to math-verify."""
    from math_verify import verify

    found = _parse(answer.text, answer.boxed)
    if not found:
        return Verdict.UNPARSED
    # Time limits are the pool's: math-verify's rest on signals, which do not interrupt a long operation on big numbers.
    equal = verify(_parse_ground_truth(ground_truth), found, timeout_seconds=None)
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


def is_expression(ground_truth: str) -> bool:
    """Whether math-verify reads a ground truth as mathematics, not merely as a string to compare letter by letter."""
    return any(not isinstance(part, str) for part in _parse_ground_truth(ground_truth))


@functools.lru_cache(maxsize=1024)  # all responses of a group have the same
def _parse_ground_truth(ground_truth: str) -> list[Any]:
    return _parse(ground_truth, boxed=True)


def _parse(text: str, boxed: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    if not boxed:
        return list(parse(text, targets, parsing_timeout=None))
    found = list(parse(rf"\boxed{{{text}}}", targets, parsing_timeout=None))
    if any(not isinstance(part, str) for part in found):
        return found
    # In a box it does not read a percentage; between dollars it does.
    return list(parse(f"${text}$", targets, parsing_timeout=None)) or found


def warm_up() -> None:
    """Load math-verify and its parser, which takes a second that no comparison's time limit should pay for."""
    # It warns that its own time limits are off, and about every expression that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _parse(r"\frac{1}{2}", boxed=True)
