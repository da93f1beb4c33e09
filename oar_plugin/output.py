"""What is logged, printed and written for people: one logger, safe text, hints for mistyped names, whole files."""

import difflib
import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

INSTALL = "pip install 'oar_plugin[recipes]'"
"""Installs what the recipes' reward needs, for a plugin that is installed. Packages that fit stay as they are."""

logger = logging.getLogger("oar_plugin")
_times = Counter[tuple[object, ...]]()


def times(*what: object) -> int:
    """Return how many calls with these arguments this process has made, this one included."""
    _times[what] += 1
    return _times[what]


def warn_once(text: str, *values: object, exc_info: bool = False) -> None:
    """Log a warning, unless this process has logged the same one before."""
    if times(text, *values) == 1:
        logger.warning(text, *values, exc_info=exc_info)


def printable(text: str) -> str:
    """`text` with every character that steers a terminal or the writing direction escaped, as in `\\x1b`; newlines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: object, file: TextIO | None = None) -> None:
    """Print `printable(text)` to `file`, by default standard output."""
    print(printable(str(text)), file=file)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the known word that is closest in spelling, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def cause(error: BaseException) -> str:
    """Return the type and the first line of the innermost cause of an error: verl wraps errors of rewards in its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, and create its folder. A symbolic link at this path is replaced, not followed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as opened:  # x follows no link
            opened.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
