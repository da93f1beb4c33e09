r"""Finds the final answer of a response, and compares it with the ground truth by math-verify.

The final answer is the last `\boxed{...}`, else the last answer that is announced in another way. A last number without an
announcement is not an answer: a truncated response could be rewarded by chance, and importance would have no answer span.
Functions that call math-verify run in the processes of a `pool`: some expressions take unbounded time or memory.
"""

import functools
import logging
from typing import Any, NamedTuple

from oar_plugin.credit.answer import make_finder

_find_boxed = make_finder(("boxed",))
_find_announced = make_finder(("hash", "answer_tag", "the_answer_is"))


class FinalAnswer(NamedTuple):
    """The text of an answer. If `boxed`, the text is the content of a box, and all of it is the answer."""

    text: str
    boxed: bool


def final_answer(response: str) -> FinalAnswer | None:
    """Return the answer by which a response is graded; None if the response has none."""
    # The box comes first because the prompt asks for it: after a box, "the answer is plausible" is only a remark.
    for find, boxed in ((_find_boxed, True), (_find_announced, False)):
        if span := find(response):
            return FinalAnswer(response[span.start : span.end], boxed)
    return None


def compare(ground_truth: str, answer: FinalAnswer) -> bool | None:
    """Return whether an answer means the same as the ground truth; None if math-verify cannot parse the answer."""
    from math_verify import verify

    parts = _parse(answer.text, answer.boxed)
    if not parts:
        return None
    # The pool limits the time. math-verify's own limit uses signals, which cannot interrupt a long operation on big numbers.
    return bool(verify(_parse(ground_truth, boxed=True), parts, timeout_seconds=None))


def canonical(answer: FinalAnswer) -> str:
    """Return the same text for all answers that math-verify parses to the same expression, as 5, 5.0 and `x = 5`.

    An answer that cannot be parsed is returned without spaces.
    """
    from math_verify.grader import unwrap_eq
    from sympy import nsimplify

    for part in _parse(answer.text, answer.boxed):
        if not isinstance(part, str):
            return str(nsimplify(unwrap_eq(part), rational=True))
    return "".join(answer.text.split())


@functools.lru_cache(maxsize=1024)  # all responses of a group have the same ground truth
def _parse(text: str, boxed: bool) -> list[Any]:
    """Return math-verify's parses of an answer; a string among them was not parsed as mathematics."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    if not boxed:
        return list(parse(text, targets, parsing_timeout=None))
    parts = list(parse(rf"\boxed{{{text}}}", targets, parsing_timeout=None))
    if any(not isinstance(part, str) for part in parts):
        return parts
    # math-verify cannot parse a percentage in a box, but it can between dollar signs.
    return list(parse(f"${text}$", targets, parsing_timeout=None)) or parts


def warm_up() -> None:
    """Load math-verify and its parser. It takes a second, which must not count against a comparison's time limit."""
    # math-verify warns that its own time limits are off, and about every expression that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _parse(r"\frac{1}{2}", boxed=True)
