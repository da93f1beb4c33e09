"""Answer distributions of tagged requests, computed where the hidden states are: in the worker of an inference engine.

Knows torch and the probes, and nothing of the engine. For every step of the engine it is told which positions of which
request the step computed; it projects only the rows that the probe reads, and hands back a few numbers when a request's
prompt ends. The distributions themselves, a vocabulary long, never leave the worker.

**Only rows that a request computed itself count.** An engine with a prefix cache skips what it finds there, and a row that
was skipped has no hidden state. Such a request scores NaN, and whoever asked asks again without the cache.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import sample_replacements
from oar_plugin.credit.probe import PROBES, Probe

Role = Literal["reference", "copy"]

NO_REFERENCE = -1.0
"""Stands in place of the number of rows where the reference is not, or no longer, known."""

MAX_REFERENCES = 64
"""References kept at most; a float64 vocabulary each, 1.2 MB at 152k tokens."""

# Rows projected at once, and of these drawn from at once: the hashes behind a draw take several int64 a logit.
_ROWS = 64
_DRAWN_ROWS = 16


@dataclass(frozen=True)
class OutcomeSpec:
    """What one request is for. Travels beside it as plain values."""

    key: str  # names the reference
    role: Role  # `reference` is kept under its key, `copy` is compared with it
    probe: Probe  # what the answer's distribution is
    start: int  # position of the answer's first token; the answer runs to the end of the prompt
    sample: tuple[int, ...] = ()  # ascending positions before the answer where a reference draws replacements
    seeds: tuple[int, ...] = ()  # one for each of them, see `perturbation.sample_replacements`

    def __post_init__(self) -> None:
        positions = (0, *self.sample, self.start)
        ascending = all(a < b for a, b in pairwise(positions))
        if self.role not in get_args(Role) or self.probe not in PROBES or not ascending:
            raise ValueError(f"not a request that can be scored: {self}")
        if len(self.seeds) != len(self.sample) or (self.sample and self.role == "copy"):
            raise ValueError(f"replacements are drawn by a reference, with a seed each: {self}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "OutcomeSpec":
        """The inverse of `to_dict`. ValueError, TypeError, KeyError: it is none."""
        return cls(**{**values, "sample": tuple(values["sample"]), "seeds": tuple(values["seeds"])})

    def rows(self, length: int) -> list[int]:
        """Positions of the logits that are read, ascending, in a prompt of `length` tokens: draws first, then the probe."""
        last = self.start if self.probe == "last" else length - 1
        return [p - 1 for p in self.sample] + list(range(self.start - 1, last))


@dataclass(frozen=True)
class Scheduled:
    """What one step of the engine computes of one tagged request."""

    request: str  # its id
    spec: OutcomeSpec
    token_ids: Sequence[int]  # the whole prompt
    first: int  # position of the first token that the step computes
    count: int  # tokens that the step computes
    offset: int  # row of the step's hidden states that belongs to `first`


class _Tally:
    """The rows of one request so far."""

    def __init__(self, spec: OutcomeSpec, token_ids: Sequence[int]) -> None:
        self.spec = spec
        self.token_ids = token_ids
        self.rows = spec.rows(len(token_ids))
        self.first_row = (spec.sample[0] if spec.sample else spec.start) - 1
        self.taken = 0  # of `rows`, in order; what is before it has been read or is lost
        self.lost = len(token_ids) <= spec.start
        self.total: Tensor | None = None  # [V] sum of logits, or scalar sum of log-probabilities
        self.drawn: list[Tensor] = []

    @property
    def probe_rows(self) -> int:
        """How many of the probe's rows were read."""
        return max(0, self.taken - len(self.spec.sample))

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
        draws = bisect_left(positions, self.spec.start - 1)
        for begin in range(0, draws, _DRAWN_ROWS):
            at = positions[begin : min(begin + _DRAWN_ROWS, draws)]
            token_R = self._tokens_after(at, logits_RV.device)
            seeds = dict(zip(self.spec.sample, self.spec.seeds, strict=True))
            seed_R = torch.tensor([seeds[p + 1] for p in at], device=logits_RV.device)
            self.drawn.append(sample_replacements(logits_RV[begin : begin + len(at)], token_R, seed_R))
        if draws == len(positions):
            return
        logits_RV = logits_RV[draws:].float()
        if self.spec.probe == "answer_joint":
            token_R = self._tokens_after(positions[draws:], logits_RV.device)
            summed = log_distribution(logits_RV).gather(-1, token_R[:, None]).sum()
        else:
            summed = logits_RV.sum(0)
        self.total = summed if self.total is None else self.total + summed

    def outcome(self) -> Tensor | None:
        """`[V]` log-distribution, or the scalar mean log-probability; None where a row is missing."""
        if self.lost or self.taken < len(self.rows) or self.total is None:
            return None
        mean = self.total / self.probe_rows
        return mean if self.spec.probe == "answer_joint" else log_distribution(mean)

    def _tokens_after(self, positions: Iterable[int], device: torch.device) -> Tensor:
        return torch.tensor([self.token_ids[p + 1] for p in positions], device=device)


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

    def step(self, hidden_TD: Tensor, items: Sequence[Scheduled]) -> dict[str, list[float]]:
        """Read what one step of the engine computed.

        Args:
            hidden_TD: hidden states of the step's tokens, packed.
            items: the tagged requests in it, in an order that all ranks share.

        Returns:
            For each request whose prompt ends in this step `[score, rows]` and, for a reference, its drawn tokens.
            `rows` is how many of the probe's rows were read. The score is the divergence in nats (0 for a reference),
            or NaN where a row was not computed in this request, the reference is not known (`rows` is then
            `NO_REFERENCE`), or the logits are not finite.
        """
        self._read(hidden_TD, items)
        ended = [item for item in items if item.first + item.count >= len(item.token_ids)]
        tallies = [self._tallies.pop(item.request) for item in ended]
        # References first: a copy may end in the very step that its reference ends in.
        for tally in tallies:
            if tally.spec.role == "reference" and (outcome := tally.outcome()) is not None:
                self._references[tally.spec.key] = (tally.spec.probe, outcome)
        while len(self._references) > MAX_REFERENCES:
            self._references.popitem(last=False)
        scores = _to_list([self._score(tally) for tally in tallies])
        found = {}
        for item, tally, score in zip(ended, tallies, scores, strict=True):
            known = tally.spec.key in self._references
            drawn = torch.cat(tally.drawn).tolist() if tally.drawn and known else []
            found[item.request] = [score, float(tally.probe_rows) if known else NO_REFERENCE, *map(float, drawn)]
        return found

    def forget(self, keys: Iterable[str]) -> None:
        """Drop these references, and the rows of requests that name them."""
        gone = set(keys)
        for key in gone:
            self._references.pop(key, None)
        self._tallies = {request: t for request, t in self._tallies.items() if t.spec.key not in gone}

    def retain(self, requests: Container[str]) -> None:
        """Drop the rows of all requests but these: an aborted one never ends."""
        self._tallies = {request: tally for request, tally in self._tallies.items() if request in requests}

    def counts(self) -> dict[str, int]:
        """How many references are kept, and how many requests are half read."""
        return {"references": len(self._references), "requests": len(self._tallies)}

    def _read(self, hidden_TD: Tensor, items: Sequence[Scheduled]) -> None:
        wanted: list[tuple[_Tally, int]] = []
        index: list[int] = []
        for item in items:
            tally = self._tallies.get(item.request)
            # An engine that starts over (preemption, a request id used again) computes every row again: so does this.
            if tally is None or item.first <= tally.first_row:
                tally = self._tallies[item.request] = _Tally(item.spec, item.token_ids)
            for position in tally.take(item.first, item.count):
                wanted.append((tally, position))
                index.append(item.offset + position - item.first)
        for begin in range(0, len(index), _ROWS):
            logits_RV = self._project(hidden_TD[torch.tensor(index[begin : begin + _ROWS], device=hidden_TD.device)])
            if logits_RV is None:
                continue
            chunk = wanted[begin : begin + _ROWS]
            bounds = [0, *(i for i in range(1, len(chunk)) if chunk[i][0] is not chunk[i - 1][0]), len(chunk)]
            for low, high in pairwise(bounds):
                chunk[low][0].add([position for _, position in chunk[low:high]], logits_RV[low:high])

    def _score(self, tally: _Tally) -> Tensor | None:
        probe, reference = self._references.get(tally.spec.key, (None, None))
        outcome = tally.outcome()
        if reference is None or outcome is None or probe != tally.spec.probe:
            return None
        self._references.move_to_end(tally.spec.key)
        # Of a reference with itself: 0, or NaN where its logits are not finite.
        return divergence(reference, outcome[None], tally.spec.probe)[0]


def _to_list(values: Sequence[Tensor | None]) -> list[float]:
    """NaN for None; one transfer from the device for all."""
    known = [value for value in values if value is not None]
    numbers = iter(torch.stack(known).tolist() if known else [])
    return [math.nan if value is None else next(numbers) for value in values]
