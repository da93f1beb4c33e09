r"""What of a response is graded, and whether it means the same as the ground truth according to math-verify.

Graded is the last `\boxed{...}`, else the last answer that is announced in another way. A number that merely stands last is no
answer: in a truncated response it would be paid by chance, and importance has no place to look at.

What calls math-verify runs in the processes of a `pool`: some expressions take for ever or all memory.
"""

import functools
import logging
from typing import Any, NamedTuple

from oar_plugin.credit.answer import make_finder

_find_boxed = make_finder(("boxed",))
_find_announced = make_finder(("hash", "answer_tag", "the_answer_is"))


class FinalAnswer(NamedTuple):
    """The text of an answer, and whether it stood in a box, so that all of it is the answer."""

    text: str
    boxed: bool


def final_answer(response: str) -> FinalAnswer | None:
    """The answer that a response is graded by; None when it gives none."""
    # The box comes first because the prompt asks for it: "the answer is plausible" behind a box is a remark.
    if span := _find_boxed(response):
        return FinalAnswer(response[span.start : span.end], True)
    if span := _find_announced(response):
        return FinalAnswer(response[span.start : span.end], False)
    return None


def compare(ground_truth: str, answer: FinalAnswer) -> bool | None:
    """Whether an answer means the same as the ground truth; None where it holds nothing that math-verify can read."""
    from math_verify import verify

    found = _parse(answer.text, answer.boxed)
    if not found:
        return None
    # Time limits are the pool's: math-verify's rest on signals, which do not interrupt a long operation on big numbers.
    return bool(verify(_parse_ground_truth(ground_truth), found, timeout_seconds=None))


def canonical(answer: FinalAnswer) -> str:
    """The same for answers that math-verify reads as the same expression; else their letters without spaces.

    As when it compares, `x = 5` is 5; and 5.0 is 5.
    """
    from math_verify.grader import unwrap_eq
    from sympy import nsimplify

    for part in _parse(answer.text, answer.boxed):
        if not isinstance(part, str):
            return str(nsimplify(unwrap_eq(part), rational=True))
    return "".join(answer.text.split())


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
