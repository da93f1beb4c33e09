"""Sentences of word problems and of their solutions; `benchmarks.learning.sentences` puts them together.

A word or a mark is one token. `{who}` has things of the kind `{what}`, and `{other}` is somebody else. `{b}` of them
come or go.
"""

import itertools
from collections.abc import Iterable

PEOPLE = ("Tom", "Mia", "Ben", "Ana", "Leo", "Eva", "Sam", "Zoe")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
THINGS = ("apples", "books", "coins", "pens", "cards", "eggs", "balls", "cups")
LARGEST = 20
START = (
    "{who} has {b} {what} .",
    "{who} starts with {b} {what} .",
    "There are {b} {what} on the desk of {who} .",
)
ON = "On {day}"
"""In front of a change, and of the step that works it out."""
EVENTS = {
    "+": (
        "{who} buys {b} more {what} .",
        "{who} finds {b} {what} at home .",
        "{other} gives {who} {b} {what} .",
    ),
    "-": (
        "{who} gives {b} {what} to {other} .",
        "{who} loses {b} {what} .",
        "{who} sells {b} of the {what} .",
    ),
    "*": (
        "{who} doubles the number of {what} .",
        "there are twice as many {what} .",
    ),
}
ASIDES = ("{other} likes {what} .", "{other} has {b} {what} .", "{other} buys {b} {what} too .", "It is a warm day .")
QUESTIONS = ("How many {what} does {who} have ?", "What is the number of {what} in the end ?")

LEADS = ("Well ,", "Now we read on .", "Let us see .", "Next ,", "So far so good .", "Then , let me think :")
SOLVED = ("that makes", "which gives", "and that is", "for a total of")
"""Between a change, which a solution repeats, and `a + b = c .`"""
END = "So the answer is"

_SENTENCES = (START, *EVENTS.values(), ASIDES, QUESTIONS, SOLVED, (ON, END))


def _words(sentences: Iterable[str]) -> set[str]:
    return {word for sentence in sentences for word in sentence.split() if "{" not in word}


LEAD_WORDS = _words(LEADS) - _words(itertools.chain(*_SENTENCES))
"""Words of lead-ins alone: they decide nothing."""
ENGLISH = (
    *map(str, range(10, LARGEST + 1)),
    *PEOPLE,
    *DAYS,
    *THINGS,
    *sorted(_words([*LEADS, *itertools.chain(*_SENTENCES)])),
)
"""The words that the other tasks do not have."""
