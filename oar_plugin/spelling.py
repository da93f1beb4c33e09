"""Names that were mistyped."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` with what is spelt most alike, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
