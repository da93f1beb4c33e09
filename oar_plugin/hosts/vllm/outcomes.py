"""Computes outcomes (answer distributions) of tagged requests in an engine's worker, which has the hidden states.

At every step of the engine, the caller says which positions of which request the step computed. `OutcomeRecorder` projects
only the rows that the probe reads. The distributions (one value per token id) stay in the worker.

**Only rows that a request computed itself count.** An engine with a prefix cache does not compute cached positions, so
their rows have no hidden state. The score of such a request is NaN.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import sample_replacements
from oar_plugin.credit.probe import PROBES, Probe

Role = Literal["reference", "copy"]

TAG = "oar"  # key in a request's `SamplingParams.extra_args`; its value is a spec, written as a dictionary

MAX_REFERENCES = 32
"""Maximum number of stored references. Each has one float64 per token of the vocabulary: 1.2 MB for 152k tokens. The
least recently used one is deleted. A call to the workers that deletes unused ones would stop the engine's steps."""

# Maximum number of rows per projection, and per draw: the hashes of a draw need several int64 per logit.
_ROWS = 64
_DRAWN_ROWS = 16


@dataclass(frozen=True)
class OutcomeSpec:
    """Spec of a request for the distribution of its answer. It is sent with the request as plain values."""

    key: str  # name of the reference
    role: Role  # `reference`: the outcome is stored under `key`; `copy`: it is compared with the stored one
    probe: Probe  # definition of the answer's distribution
    start: int  # position of the answer's first token; the prompt ends with the answer

    def __post_init__(self) -> None:
        if self.role not in get_args(Role) or self.probe not in PROBES or self.start < 1:
            raise ValueError(f"not a request that can be scored: {self}")

    def rows(self, length: int) -> list[int]:
        """Return positions of the logits to read in a prompt of `length` tokens, ascending; [] if it is too short."""
        end = self.start if self.probe == "last" else length
        return list(range(self.start - 1, min(end, length - 1)))


@dataclass(frozen=True)
class DrawSpec:
    """Spec of a request for replacements: for each position in `at`, a token is drawn from the model's prediction."""

    at: tuple[int, ...]  # the positions, ascending; the prompt may end directly before the last position
    avoid: tuple[int, ...]  # the response's tokens at these positions, which are not drawn
    seeds: tuple[int, ...]  # see `perturbation.sample_replacements`

    def __post_init__(self) -> None:
        ascending = [0, *self.at] == sorted({0, *self.at})
        if not self.at or not ascending or not len(self.at) == len(self.avoid) == len(self.seeds):
            raise ValueError(f"not a request that can draw tokens: {self}")

    def rows(self, length: int) -> list[int]:
        return [p - 1 for p in self.at] if length >= self.at[-1] else []


Spec: TypeAlias = OutcomeSpec | DrawSpec


def read_spec(values: dict[str, Any]) -> Spec:
    """Return the spec whose `dataclasses.asdict` is `values`. ValueError, TypeError: `values` are not a spec."""
    if "at" in values:
        return DrawSpec(**{name: tuple(numbers) for name, numbers in values.items()})
    return OutcomeSpec(**values)


@dataclass(frozen=True)
class Scheduled:
    """The part of one tagged request that one step of the engine computes."""

    request: str  # its id
    spec: Spec
    token_ids: Sequence[int]  # the whole prompt
    first: int  # position of the first token that the step computes
    count: int  # tokens that the step computes
    offset: int  # row of the step's hidden states that belongs to `first`


class _Tally:
    """The rows of one request that have been read so far, and their sums or drawn tokens."""

    def __init__(self, spec: Spec, token_ids: Sequence[int]) -> None:
        self.spec = spec
        self.token_ids = token_ids
        self.rows = spec.rows(len(token_ids))
        self.taken = 0  # number of `rows` that have been read, in order
        self.total: Tensor | None = None  # [V] sum of logits, or scalar sum of log-probabilities
        self.drawn: list[Tensor] = []

    def take(self, first: int, count: int) -> list[int]:
        """Return the rows to read in a step that computes `first .. first + count - 1`. After a preemption the engine may start
        at a position whose row was read already: no row is read twice. If the next row was not computed, none is read.
        """
        left = self.rows[self.taken :]
        if not left or first > left[0]:
            return []
        rows = [p for p in left if p < first + count]
        self.taken += len(rows)
        return rows

    def add(self, positions: Sequence[int], logits_RV: Tensor) -> None:
        """Add the logits of the rows at `positions` to the sum, or draw tokens from them. Rows must come in order."""
        if isinstance(self.spec, DrawSpec):
            begin = self.rows.index(positions[0])
            for chunk_RV in logits_RV.split(_DRAWN_ROWS):
                chunk, begin = slice(begin, begin + len(chunk_RV)), begin + len(chunk_RV)
                token_R = _on(chunk_RV.device, self.spec.avoid[chunk])
                seed_R = _on(chunk_RV.device, self.spec.seeds[chunk])
                self.drawn.append(sample_replacements(chunk_RV, token_R, seed_R))
            return
        logits_RV = logits_RV.float()
        if self.spec.probe == "answer_joint":
            token_R = _on(logits_RV.device, [self.token_ids[p + 1] for p in positions])
            summed = log_distribution(logits_RV).gather(-1, token_R[:, None]).sum()
        else:
            summed = logits_RV.sum(0)
        self.total = summed if self.total is None else self.total + summed

    @property
    def complete(self) -> bool:
        return 0 < self.taken == len(self.rows)

    def outcome(self) -> Tensor | None:
        """Return the log-distribution `[V]`, or the mean log-probability; None if a row is missing, or for a draw."""
        if not isinstance(self.spec, OutcomeSpec) or not self.complete or self.total is None:
            return None
        mean = self.total / self.taken
        return mean if self.spec.probe == "answer_joint" else log_distribution(mean)


class OutcomeRecorder:
    """Computes the outcomes of the tagged requests of one worker.

    `project` returns logits `[R, V]` from hidden states `[R, D]`; None on a tensor-parallel rank that does not get the logits.
    Such a rank counts the same rows, so that all ranks call `project` together, with the same rows.
    """

    def __init__(self, project: Callable[[Tensor], Tensor | None]) -> None:
        self._project = project
        self._tallies: dict[str, _Tally] = {}
        self._references: OrderedDict[str, tuple[Probe, Tensor]] = OrderedDict()

    def step(self, hidden_TD: Tensor, items: Sequence[Scheduled]) -> dict[str, Tensor]:
        """Read the results of one engine step, whose packed tokens have `hidden_TD`. Does not wait for the device.

        `items` are the tagged requests in this step, in the same order on all ranks. Returns for each one whose prompt ends in
        this step: `[score, rows]` and the drawn tokens, float32 on the device (exact up to 2^24). `rows` is the number of rows
        that were read. The score is the divergence in nats; it is 0 for a reference or a draw. It is NaN if a row was not
        computed in this request, if the reference is not known (`rows` is then 0), or if the logits are not finite.
        """
        self._read(hidden_TD, items)
        ended = [item for item in items if item.first + item.count >= len(item.token_ids)]
        tallies = {item.request: self._tallies.pop(item.request) for item in ended}
        # Store references first: a copy may end in the same step as its reference.
        for tally in tallies.values():
            spec = tally.spec
            if isinstance(spec, OutcomeSpec) and spec.role == "reference" and (outcome := tally.outcome()) is not None:
                self._references[spec.key] = (spec.probe, outcome)
        while len(self._references) > MAX_REFERENCES:
            self._references.popitem(last=False)
        return {request: self._numbers(tally, hidden_TD.device) for request, tally in tallies.items()}

    def retain(self, requests: Container[str]) -> None:
        """Keep only the rows of these requests. An aborted request never ends, so its rows must be dropped here."""
        self._tallies = {request: tally for request, tally in self._tallies.items() if request in requests}

    def _read(self, hidden_TD: Tensor, items: Sequence[Scheduled]) -> None:
        wanted: list[tuple[_Tally, int, int]] = []  # with each row's position in the prompt and in `hidden_TD`
        for item in items:
            tally = self._tallies.get(item.request)
            # If the engine starts a request again (preemption, or a request id used again), every row is read again: no row
            # is before the step's first position.
            if tally is None or not tally.rows or item.first <= tally.rows[0]:
                tally = self._tallies[item.request] = _Tally(item.spec, item.token_ids)
            wanted += [(tally, p, item.offset + p - item.first) for p in tally.take(item.first, item.count)]
        for begin in range(0, len(wanted), _ROWS):
            chunk = wanted[begin : begin + _ROWS]
            logits_RV = self._project(hidden_TD[_on(hidden_TD.device, [row for *_, row in chunk])])
            if logits_RV is None:
                continue
            for tally, group in groupby(chunk, key=itemgetter(0)):
                positions = [position for _, position, _ in group]
                own_RV, logits_RV = logits_RV[: len(positions)], logits_RV[len(positions) :]
                tally.add(positions, own_RV)

    def _numbers(self, tally: _Tally, device: torch.device) -> Tensor:
        """Return the result of `step` for a request that has ended."""
        spec, score, rows = tally.spec, torch.full((1,), math.nan, device=device), tally.taken
        drawn: list[Tensor] = []
        if isinstance(spec, DrawSpec):
            if tally.complete and tally.drawn:
                score, drawn = torch.zeros_like(score), tally.drawn
        elif spec.key in self._references:
            probe, reference = self._references[spec.key]
            if probe == spec.probe and (outcome := tally.outcome()) is not None:
                self._references.move_to_end(spec.key)
                # For a reference, the divergence from itself: 0, or NaN if its logits are not finite.
                score = divergence(reference, outcome[None], probe)
        else:
            rows = 0
        return torch.cat([score.float(), torch.full((1,), float(rows), device=device), *(d.float() for d in drawn)])


def _on(device: torch.device, numbers: Iterable[int]) -> Tensor:
    """Return int64 numbers on the device. A copy from memory that is not pinned would wait for the device's work."""
    values = torch.tensor(list(numbers), dtype=torch.int64)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
