"""What a check has to say: a line of `oar doctor` and of `oar launch`."""

from importlib.util import find_spec
from typing import Literal, NamedTuple

Level = Literal["ok", "note", "not checked", "missing"]
"""In place; worth knowing; could not be seen from here; a run would not start."""


class Finding(NamedTuple):
    """What was looked at, how it stands, what was found and what to do."""

    subject: str
    level: Level
    text: str
    advice: str = ""


def cause(error: BaseException) -> str:
    """The first line of what an error was raised from in the end: verl wraps those of a reward, say."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def importable(module: str) -> bool:
    """Return whether Python finds a module, without importing it; False where a package above it is missing or broken."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
