"""One response with its credit, as a line of a dump (`algorithm.oar.dump.dir`) and as the inspector's page shows it.

A dump is a folder with a file `step_000010.jsonl` a step. Its first line is the header: versions and settings of the run. Every
other line is a `Response`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

FORMAT = 1
RIGHT_FROM = 0.5  # rewards are 0 or 1, or -1 or 1, and a share below a half is given for the form alone


@dataclass(frozen=True)
class Header:
    """What a run's responses have in common."""

    versions: Mapping[str, str]  # of a package by its name
    config: Mapping[str, Any]  # the settings below algorithm.oar; `tau` with its default filled in
    arbitrary_scale: Mapping[str, bool]  # of an importance by its name: see `Importance.arbitrary_scale`
    oar_dump: int = FORMAT

    def line(self) -> str:
        return json.dumps(vars(self)) + "\n"


@dataclass(frozen=True)
class Response:
    """One response. What stands a token is as long as `tokens`; None is what nobody has computed.

    Attributes:
        step: training step.
        group: the prompt's id, which its siblings share.
        uid: the response's own id.
        source: the data set.
        prompt: its text.
        truth: the right answer.
        token_ids: of the response.
        tokens: their texts; bytes that are half a character stand as `\\xe2`.
        segments: a `Segment` each.
        importance: by the name of the importance, 0 where nothing was scored.
        weights: what each token's advantage was multiplied by.
        log_probs: of each token, in nats, under the policy before the update.
        entropies: of the distribution that each token was drawn from, in nats.
        advantage: before reshaping.
        reward: of the whole response.
        status: name of a `Status` in small letters.
    """

    step: int
    group: str
    uid: str
    source: str
    prompt: str
    truth: str | None
    token_ids: list[int]
    tokens: list[str]
    segments: list[int]
    importance: dict[str, list[float]]
    weights: list[float] | None
    log_probs: list[float] | None
    entropies: list[float] | None
    advantage: float | None
    reward: float | None
    status: str

    def __post_init__(self) -> None:
        a_token: list[Sequence[object]] = [self.tokens, self.segments, *self.importance.values()]
        a_token += [row for row in (self.weights, self.log_probs, self.entropies) if row is not None]
        if {len(row) for row in a_token} != {len(self.token_ids)}:
            raise ValueError(f"response {self.uid!r}: its rows differ in length")

    @property
    def right(self) -> bool | None:
        return None if self.reward is None else self.reward >= RIGHT_FROM

    def line(self) -> str:
        """A line of a dump. Numbers that JSON does not have (`nan`, `inf`) are written as Python's json reads them."""
        return json.dumps(vars(self)) + "\n"


def response(line: str) -> Response:
    """A line of a dump.

    Raises:
        ValueError, KeyError, TypeError: it is none, or half of one.
    """
    record = json.loads(line)
    return Response(**{field.name: record[field.name] for field in fields(Response)})


def header(line: str) -> Header:
    """The first line of a file of a dump.

    Raises:
        ValueError, KeyError, TypeError: it is none, or of a format that this version does not read.
    """
    record = json.loads(line)
    made = Header(**{field.name: record[field.name] for field in fields(Header)})
    if made.oar_dump != FORMAT:
        raise ValueError(f"a dump of format {made.oar_dump}; this version reads {FORMAT}")
    return made


def printable(pieces: list[bytes]) -> list[str]:
    """Texts of tokens from their bytes. Whole characters as they are; bytes of one that two tokens share as `\\xe2`."""
    return [piece.decode("utf-8", errors="backslashreplace") for piece in pieces]
