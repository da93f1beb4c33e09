"""One response with its credit, as a line of a dump (`algorithm.oar.dump.dir`) and as the inspector's page shows it.

A dump is a folder with a file `step_000010.jsonl` a step. Its first line is the header: versions and settings of the run. Every
other line is a `Response`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, FiniteFloat, TypeAdapter, ValidationError

if TYPE_CHECKING:
    from oar_plugin.config import OarConfig

FORMAT = 1
PACKAGES = ("oar_plugin", "torch", "transformers", "vllm", "trl", "openrlhf", "deepspeed")
PREDICTED = ", predicted"  # ends the name of an importance that was predicted
RIGHT_FROM = 0.5  # rewards are 0 or 1, or -1 or 1; below 0.5 a response got points for its form only


def is_right(reward: float | None) -> bool | None:
    """Returns whether a reward is that of a right answer; None if there is no reward: it is None, NaN or infinite."""
    return reward >= RIGHT_FROM if reward is not None and math.isfinite(reward) else None


def fault_in(error: ValueError | RecursionError) -> str:
    """Returns what is wrong with a line: it is not JSON, or a key is missing or has a wrong value."""
    if not isinstance(error, ValidationError):
        return f"not JSON: {error}"
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        return f"not JSON: {fault['ctx']['error'].replace('line 1 ', '')}"
    words = [*map(str, fault["loc"]), fault["msg"].removeprefix("Value error, ")]
    return f"{': '.join(words)}; here {fault['input']!r:.200}"


@dataclass(frozen=True)
class Header:
    """What a run's responses have in common."""

    versions: Mapping[str, str]  # of a package by its name
    config: Mapping[str, Any]  # the settings below algorithm.oar; `tau` with its default filled in
    arbitrary_scale: Mapping[str, bool]  # of an importance by its name: see `Importance.arbitrary_scale`
    oar_dump: int = FORMAT
    run: str = ""  # name of its folder
    model: str = ""  # name or path

    def line(self) -> str:
        return json.dumps(vars(self)) + "\n"


class Weighing(BaseModel, strict=True):
    """The settings in `Header.config` that turn importance into weights."""

    importance: str
    gate: str
    tau: FiniteFloat
    beta: FiniteFloat
    floor: FiniteFloat


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response. Lists have one entry per token. None: not computed."""

    step: int  # training step
    group: str  # the prompt's id, which its siblings share
    uid: str  # the response's own id
    source: str = ""  # the data set
    prompt: str  # its text
    truth: str | None = None  # the right answer
    token_ids: list[int]  # of the response
    tokens: list[str]  # their texts; a byte that is part of a character is written as `\\xe2`
    segments: list[int]  # a `Segment` each
    importance: dict[str, list[float]]  # by the name of the importance; 0 where nothing was scored
    weights: list[float] | None = None  # factors of the advantages
    log_probs: list[float] | None = None  # in nats, under the policy before the update
    entropies: list[float] | None = None  # of the distributions that the tokens were drawn from, in nats
    mask: list[int] | None = None  # 1 at the model's own tokens, 0 at a tool's; None: all are the model's own
    advantage: float | None = None  # before reshaping
    reward: float | None = None  # of the whole response; NaN: it has none
    status: str  # name of a `Status` in small letters

    def __post_init__(self) -> None:
        rows: list[Sequence[object] | None] = [self.tokens, self.segments, *self.importance.values()]
        rows += [self.weights, self.log_probs, self.entropies, self.mask]
        if any(row is not None and len(row) != len(self.token_ids) for row in rows):
            raise ValueError(f"response {self.uid!r}: its rows differ in length")

    @property
    def right(self) -> bool | None:
        return is_right(self.reward)

    def line(self) -> str:
        """A line of a dump. Numbers that JSON does not have (`nan`, `inf`) are written as Python's json reads them."""
        return json.dumps(vars(self)) + "\n"


parse_response = partial(TypeAdapter(Response).validate_json, strict=True)
"""Reads a line of a dump. ValueError: it is another line, or only a part of one."""
_HEADER = TypeAdapter(Header)


def parse_header(line: str) -> Header:
    """Reads the first line of a file of a dump. ValueError: it is not one, or its format is not this version's."""
    try:
        made = _HEADER.validate_json(line, strict=True)
        Weighing.model_validate(made.config)
    except ValidationError as error:
        raise ValueError(fault_in(error)) from None
    if made.oar_dump != FORMAT:
        raise ValueError(f"a dump of format {made.oar_dump}; this version reads {FORMAT}")
    return made


def header_for(configs: "Sequence[OarConfig]", *, run: str = "", model: str = "", **versions: str) -> Header:
    """Returns the header of responses with the importances of `configs` and the other settings of the first of them.

    `versions` are added to those of the installed `PACKAGES`.
    """
    from oar_plugin.credit.importance import importance_of  # imports torch

    config, names = configs[0], [name for one in configs for name in (one.importance, one.actor_importance) if name]
    scales = {one.name: one.arbitrary_scale for one in map(importance_of, names)}
    installed = {name: next(iter(distributions(name=name)), None) for name in PACKAGES}
    versions |= {name: package.version for name, package in installed.items() if package}
    return Header(versions, config.model_dump(mode="json") | {"tau": config.quantile}, scales, run=run, model=model)
