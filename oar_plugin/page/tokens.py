"""A page that shows responses with every token shaded by its OAR weight; `tokens.html.j2` is its HTML.

One self-contained file: no script from elsewhere, no font, no request. Orange is above 1, blue below: told apart with every
common form of colour-blindness, and the weight itself is in the tooltip. A token's border tells its segment.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from oar_plugin.credit.answer import Segment

ABOVE, BELOW = (224, 122, 31), (96, 158, 230)
"""Colours of the largest and the smallest weight; weight 1 is white."""


@dataclass(frozen=True)
class TokenRow:
    """One response, with the fields of a line of what ``algorithm.oar.dump_dir`` holds.

    ``tokens``, ``weights``, ``importance`` and ``segments`` are equally long.
    """

    prompt: str  # the text before the response
    tokens: Sequence[str]  # the text of each token
    weights: Sequence[float]  # what each token's advantage was multiplied by
    importance: Sequence[float]  # how much each token moved the answer's distribution; 0 where not scored
    segments: Sequence[int]  # a `Segment` each
    advantage: float  # of the whole response, before reshaping
    reward: float  # of the whole response
    status: str  # what became of it, the name of a `Status` in small letters
    step: int  # training step
    uid: str  # which response; shown as it is

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.weights), len(self.importance), len(self.segments)}
        if len(lengths) != 1:
            raise ValueError(f"response {self.uid!r}: tokens, weights, importance and segments differ in length")

    @property
    def scored(self) -> list[float]:
        """The weights of the reasoning tokens."""
        pairs = zip(self.weights, self.segments, strict=True)
        return [weight for weight, segment in pairs if segment == Segment.REASONING]


def token_row(record: Mapping[str, Any]) -> TokenRow:
    """One line of a dump. Its ``advantage`` may be one number, or one a token."""
    values = {field.name: record[field.name] for field in fields(TokenRow)}
    advantage, status = values["advantage"], str(values["status"]).lower()
    if isinstance(advantage, list):
        advantage = next(iter(advantage), 0.0)
    numbers = {"advantage": float(advantage), "reward": float(values["reward"]), "step": int(values["step"])}
    return TokenRow(**values | numbers | {"status": status, "uid": str(values["uid"])})


def shade(weight: float) -> str:
    """CSS colour of a weight: blue below 1, white at 1, orange above; on a log scale, full at 0.25 and at 4."""
    if not math.isfinite(weight):
        return "#ddd"
    amount = max(-1.0, min(1.0, math.log(max(weight, 1e-6)) / math.log(4.0)))
    target = ABOVE if amount > 0 else BELOW
    r, g, b = (round(255 + (channel - 255) * abs(amount) * 0.85) for channel in target)
    return f"#{r:02x}{g:02x}{b:02x}"


def tokens_page(rows: Sequence[TokenRow], title: str) -> str:
    """The page as one string. Rows appear by training step, in the order given within a step."""
    return str(_HTML.tokens_page(rows, title))


def page(title: str, lead: str, sections: str) -> str:
    """A whole page.

    Args:
        title: plain text.
        lead: plain text below it.
        sections: HTML.
    """
    return str(_HTML.page(title, lead, Markup(sections)))


def shaded(
    tokens: Sequence[str], weights: Sequence[float], importance: Sequence[float], segments: Sequence[int]
) -> str:
    """HTML of the tokens of a response, each shaded by its weight; the arguments are those of `TokenRow`."""
    return str(_HTML.shaded(zip(tokens, weights, importance, segments, strict=True)))


def _visible(text: str) -> str:
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    return shown if text.strip() else shown.replace(" ", "␣")


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_NAMES = {segment.value: segment.name.lower() for segment in Segment}
_ENVIRONMENT.globals |= {"Segment": Segment, "NAMES": _NAMES, "shade": shade, "visible": _visible, "zip": zip}
_HTML: Any = _ENVIRONMENT.get_template("tokens.html.j2").module
