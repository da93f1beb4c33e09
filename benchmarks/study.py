"""What every study shares: a package `benchmarks.<name>` with a docstring for its help, `Settings` and `measure`."""

from __future__ import annotations

from typing import Any, Protocol


class Progress(Protocol):
    """Called as each piece of work begins: what it is, how many pieces are done, and of how many (None: not known)."""

    def __call__(self, what: str, done: int | None = None, of: int | None = None) -> None: ...


def silent(what: str, done: int | None = None, of: int | None = None) -> None:
    """For tests."""


def check_at_least_one(settings: Any, *names: str) -> None:
    """Raises: ValueError, with the option, where a field is below 1."""
    for name in names:
        if (value := getattr(settings, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
