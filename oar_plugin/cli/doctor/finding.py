"""One line of `oar doctor`."""

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "not checked", "missing"]
"""In place; worth knowing; could not be seen from here; a run would not start."""


class Finding(NamedTuple):
    """What was looked at, how it stands, what was found and what to do."""

    subject: str
    level: Level
    text: str
    advice: str = ""
