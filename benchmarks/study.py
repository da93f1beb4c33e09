"""What every study shares: a package `benchmarks.<name>` with a docstring for its help, `Settings` and `measure`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as each piece of work begins: what it is, how many pieces are done, and of how many (None: not known)."""

    def __call__(self, what: str, done: int | None = None, of: int | None = None) -> None: ...


def silent(what: str, done: int | None = None, of: int | None = None) -> None:
    """For tests."""
