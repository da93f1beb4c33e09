r"""What of a response is graded: its last `\boxed{...}`, else the last answer that is announced in another way.

A number that merely stands last is no answer: in a truncated response it would be paid by chance, and importance has no
place to look at.
"""

from __future__ import annotations

from typing import NamedTuple

from oar_plugin.credit.answer import make_finder

# The box comes first because the prompt asks for it: "the answer is plausible" behind a box is a remark.
BOXED = ("boxed",)
ANNOUNCED = ("hash", "answer_tag", "the_answer_is")

_find_boxed = make_finder(BOXED)
_find_announced = make_finder(ANNOUNCED)


class FinalAnswer(NamedTuple):
    """The text of an answer, and whether it stood in a box, so that all of it is the answer."""

    text: str
    boxed: bool


def final_answer(response: str) -> FinalAnswer | None:
    """The answer that a response is graded by; None when it gives none."""
    if span := _find_boxed(response):
        return FinalAnswer(response[span.start : span.end], True)
    if span := _find_announced(response):
        return FinalAnswer(response[span.start : span.end], False)
    return None
