"""Answer distributions of tagged requests, computed where the hidden states are: in the worker of an inference engine.

It knows torch and the probes, and nothing of the engine. For every step of the engine it is told which positions of which
request the step computed; it projects only the rows that the probe reads, and hands back a few numbers when a request's
prompt ends. The distributions themselves, a vocabulary long, never leave the worker.

**Only rows that a request computed itself count.** An engine with a prefix cache skips what it finds there, and a row that
was skipped has no hidden state. Such a request scores NaN, and whoever asked asks again without the cache.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import sample_replacements
from oar_plugin.credit.probe import PROBES, Probe

Role = Literal["reference", "copy"]

TAG = "oar"
"""The key of a spec, as a dictionary, in the `SamplingParams.extra_args` of a request."""

NO_REFERENCE = -1.0
"""Replaces the number of rows where the reference is not known, or no longer."""

MAX_REFERENCES = 32
"""References kept; a float64 vocabulary each, 1.2 MB at 152k tokens. Nobody says when one is of no more use: that would take a
call to the workers, and an engine makes no step during one. The least recently used makes room."""

# Rows projected at once, and of these drawn from at once: the hashes behind a draw take several int64 a logit.
_ROWS = 64
_DRAWN_ROWS = 16


@dataclass(frozen=True)
class OutcomeSpec:
    """A request for its answer's distribution. The spec travels beside the request as plain values."""

    key: str  # names the reference
    role: Role  # `reference` is kept under its key, `copy` is compared with it
    probe: Probe  # what the answer's distribution is
    start: int  # position of the answer's first token; the answer runs to the end of the prompt

    def __post_init__(self) -> None:
        if self.role not in get_args(Role) or self.probe not in PROBES or self.start < 1:
            raise ValueError(f"not a request that can be scored: {self}")

    def rows(self, length: int) -> list[int]:
        """Positions of the logits that are read, ascending, in a prompt of `length` tokens; none where it is too short."""
        if length <= self.start:
            return []
        return list(range(self.start - 1, self.start if self.probe == "last" else length - 1))


@dataclass(frozen=True)
class DrawSpec:
    """A request for replacements: a token for each of some positions, drawn from the model's prediction there."""

    at: tuple[int, ...]  # the positions, ascending; the prompt may end right before the last of them
    avoid: tuple[int, ...]  # the tokens that stand there
    seeds: tuple[int, ...]  # see `perturbation.sample_replacements`

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in pairwise((0, *self.at)))
        if not self.at or not ascending or not len(self.at) == len(self.avoid) == len(self.seeds):
            raise ValueError(f"not a request that tokens can be drawn by: {self}")

    def rows(self, length: int) -> list[int]:
        """Positions of the logits that are read, ascending, in a prompt of `length` tokens; none where it is too short."""
        return [p - 1 for p in self.at] if length >= self.at[-1] else []


Spec: TypeAlias = OutcomeSpec | DrawSpec


def read_spec(values: dict[str, Any]) -> Spec:
    """The inverse of `dataclasses.asdict`. ValueError, TypeError: the values are no spec."""
    if "at" in values:
        return DrawSpec(**{name: tuple(numbers) for name, numbers in values.items()})
    return OutcomeSpec(**values)


@dataclass(frozen=True)
class Scheduled:
    """The part of one tagged request that one step of the engine computes."""

    request: str  # its id
    spec: Spec | None  # None: its tag makes no sense
    token_ids: Sequence[int]  # the whole prompt
    first: int  # position of the first token that the step computes
    count: int  # tokens that the step computes
    offset: int  # row of the step's hidden states that belongs to `first`


class _Tally:
    """The rows of one request so far."""

    def __init__(self, spec: Spec, token_ids: Sequence[int]) -> None:
        self.spec = spec
        self.token_ids = token_ids
        self.rows = spec.rows(len(token_ids))
        self.taken = 0  # of `rows`, in order; what is before it has been read or is lost
        self.lost = not self.rows
        self.total: Tensor | None = None  # [V] sum of logits, or scalar sum of log-probabilities
        self.drawn: list[Tensor] = []

    def starts_over(self, first: int) -> bool:
        """Whether a step from position `first` on computes every row again."""
        return not self.rows or first <= self.rows[0]

    def take(self, first: int, count: int) -> list[int]:
        """The rows to read in a step that computes positions `first .. first + count - 1`: each once."""
        if self.lost or self.taken == len(self.rows):
            return []
        if first > self.rows[self.taken]:
            self.lost = True
            return []
        # After a preemption the engine may start in the middle, before what was read already: no row is read twice.
        begin, self.taken = self.taken, max(self.taken, bisect_left(self.rows, first + count))
        return self.rows[begin : self.taken]

    def add(self, positions: Sequence[int], logits_RV: Tensor) -> None:
        """Account for the logits of some rows, in order."""
        if isinstance(self.spec, DrawSpec):
            self._draw(self.spec, bisect_left(self.rows, positions[0]), logits_RV)
            return
        logits_RV = logits_RV.float()
        if self.spec.probe == "answer_joint":
            token_R = _on(logits_RV.device, [self.token_ids[p + 1] for p in positions])
            summed = log_distribution(logits_RV).gather(-1, token_R[:, None]).sum()
        else:
            summed = logits_RV.sum(0)
        self.total = summed if self.total is None else self.total + summed

    def _draw(self, spec: DrawSpec, begin: int, logits_RV: Tensor) -> None:
        for chunk_RV in logits_RV.split(_DRAWN_ROWS):
            end = begin + len(chunk_RV)
            token_R, seed_R = (_on(chunk_RV.device, numbers[begin:end]) for numbers in (spec.avoid, spec.seeds))
            self.drawn.append(sample_replacements(chunk_RV, token_R, seed_R))
            begin = end

    @property
    def complete(self) -> bool:
        return not self.lost and self.taken == len(self.rows)

    def outcome(self) -> Tensor | None:
        """`[V]` log-distribution, or the scalar mean log-probability; None where a row is missing."""
        if not isinstance(self.spec, OutcomeSpec) or not self.complete or self.total is None:
            return None
        mean = self.total / self.taken
        return mean if self.spec.probe == "answer_joint" else log_distribution(mean)


class OutcomeRecorder:
    """Outcomes of the tagged requests of one worker.

    Args:
        project: hidden states `[R, D]` to logits `[R, V]`; None on a tensor-parallel rank that logits are not gathered
            to. Such a rank keeps the same books, so that all ranks call it together and with the same rows.
    """

    def __init__(self, project: Callable[[Tensor], Tensor | None]) -> None:
        self._project = project
        self._tallies: dict[str, _Tally] = {}
        self._references: OrderedDict[str, tuple[Probe, Tensor]] = OrderedDict()

    def step(self, hidden_TD: Tensor, items: Sequence[Scheduled]) -> dict[str, Tensor]:
        """Read what one step of the engine computed. Waits for nothing that the device has still to do.

        Args:
            hidden_TD: hidden states of the step's tokens, packed.
            items: the tagged requests in it, in an order that all ranks share.

        Returns:
            For each request whose prompt ends in this step, float32 on the device, `[score, rows]` and the drawn tokens (exact
            up to 2^24). `rows` is how many of the request's rows were read. The score is the divergence in nats (0 for a
            reference, and where tokens were drawn), or NaN where a row was not computed in this request, the reference is
            not known (`rows` is then `NO_REFERENCE`), or the logits are not finite.
        """
        self._read(hidden_TD, items)
        ended = [item for item in items if item.first + item.count >= len(item.token_ids)]
        tallies = {item.request: self._tallies.pop(item.request, None) for item in ended}
        # References first: a copy may end in the very step that its reference ends in.
        for tally in tallies.values():
            if tally is None or (outcome := tally.outcome()) is None:
                continue
            if isinstance(tally.spec, OutcomeSpec) and tally.spec.role == "reference":
                self._references[tally.spec.key] = (tally.spec.probe, outcome)
        while len(self._references) > MAX_REFERENCES:
            self._references.popitem(last=False)
        return {request: self._numbers(tally, hidden_TD.device) for request, tally in tallies.items()}

    def retain(self, requests: Container[str]) -> None:
        """Drop the rows of all requests but these: an aborted one never ends."""
        self._tallies = {request: tally for request, tally in self._tallies.items() if request in requests}

    def counts(self) -> dict[str, int]:
        """How many references are kept, and of how many requests some rows are read."""
        return {"references": len(self._references), "requests": len(self._tallies)}

    def _read(self, hidden_TD: Tensor, items: Sequence[Scheduled]) -> None:
        wanted: list[tuple[_Tally, int]] = []
        index: list[int] = []
        for item in items:
            if item.spec is None:
                continue
            tally = self._tallies.get(item.request)
            # An engine that starts over (preemption, a request id used again) computes every row again: so does this.
            if tally is None or tally.starts_over(item.first):
                tally = self._tallies[item.request] = _Tally(item.spec, item.token_ids)
            for position in tally.take(item.first, item.count):
                wanted.append((tally, position))
                index.append(item.offset + position - item.first)
        for begin in range(0, len(index), _ROWS):
            logits_RV = self._project(hidden_TD[_on(hidden_TD.device, index[begin : begin + _ROWS])])
            if logits_RV is None:
                continue
            chunk = wanted[begin : begin + _ROWS]
            bounds = [0, *(i for i in range(1, len(chunk)) if chunk[i][0] is not chunk[i - 1][0]), len(chunk)]
            for low, high in pairwise(bounds):
                chunk[low][0].add([position for _, position in chunk[low:high]], logits_RV[low:high])

    def _numbers(self, tally: _Tally | None, device: torch.device) -> Tensor:
        """What `step` returns for a request that has ended. `tally` is None where its tag made no sense."""
        nan = torch.full((1,), math.nan, device=device)
        unknown = torch.full((1,), NO_REFERENCE, device=device)
        if tally is None:
            return torch.cat([nan, unknown])
        rows = torch.full((1,), float(tally.taken), device=device)
        if isinstance(tally.spec, DrawSpec):
            drawn = [numbers.float() for numbers in tally.drawn] if tally.complete else []
            return torch.cat([torch.zeros_like(nan) if drawn else nan, rows, *drawn])
        probe, reference = self._references.get(tally.spec.key, (None, None))
        if reference is None:
            return torch.cat([nan, unknown])
        outcome = tally.outcome()
        if outcome is None or probe != tally.spec.probe:
            return torch.cat([nan, rows])
        self._references.move_to_end(tally.spec.key)
        # Of a reference with itself: 0, or NaN where its logits are not finite.
        return torch.cat([divergence(reference, outcome[None], tally.spec.probe).float(), rows])


def _on(device: torch.device, numbers: Iterable[int]) -> Tensor:
    """int64 on the device. A copy from memory that is not pinned would wait for all work of the device."""
    values = torch.tensor(list(numbers), dtype=torch.int64)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
