"""Text from files and models of others, made safe to print."""

from typing import TextIO


def printable(text: str) -> str:
    """`text` with what steers a terminal or the direction of writing as `\\x1b`; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: object, file: TextIO | None = None) -> None:
    """Print `printable(text)`; to standard output without `file`."""
    print(printable(str(text)), file=file)
