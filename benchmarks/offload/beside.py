"""How fast an engine generates while it scores, against how fast it generates alone."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.offload.engine import Engine
from benchmarks.offload.scoring import scoring_task
from benchmarks.responses import Response
from oar_plugin.config import PerturbationConfig
from oar_plugin.hosts.vllm.scorer import ResponseScorer
from oar_plugin.hosts.vllm.throttle import Throttle

DEFAULT_SHARE = PerturbationConfig().share_while_generating
SHARES: tuple[float | None, ...] = (None, DEFAULT_SHARE, 1.0)
"""What is compared: generation alone, copies as they are let in by default, and copies without a limit in time."""

MOST_TOKENS = 256
"""Tokens of each request, at most: enough for the account of the throttle to come to rest, many times over."""

# Responses that are scored at a time, over and over: always more copies wait than may run.
_SCORED_AT_ONCE = 4


@dataclass
class Beside:
    """Generation with copies let in for `share` of the time; None: without any.

    Attributes:
        share: see `Throttle`.
        requests: that generate at a time.
        tokens: that each of them generates.
        seconds: of each round, from the first request to the end of the last. All have one length and end together.
        copies: of each round, those that ended meanwhile.
    """

    share: float | None
    requests: int
    tokens: int
    seconds: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each round."""
        return [self.requests * self.tokens / seconds for seconds in self.seconds]

    @property
    def rate(self) -> float:
        """Median of the tokens a second."""
        return statistics.median(self.rates)

    @property
    def copy_rate(self) -> float:
        """Median of the copies a second."""
        return statistics.median(copies / s for copies, s in zip(self.copies, self.seconds, strict=True))


class _Counting(Throttle):
    """Counts the requests of the scorer that have ended: copies, and one reference a response."""

    done = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        async with super().slot():
            yield
        self.done += 1


def generate_beside(engine: Engine, beside: Beside, responses: Sequence[Response], padding: int) -> None:
    """One round of `beside`.

    Args:
        engine: an idle one.
        beside: takes the result.
        responses: prompts are theirs, and so are the copies.
        padding: the token that replaces others in copies.
    """
    engine.run(_generate_beside(engine, beside, responses, padding))


async def _generate_beside(engine: Engine, beside: Beside, responses: Sequence[Response], padding: int) -> None:
    throttle = _Counting(PerturbationConfig().max_in_flight, beside.share or 0.0)
    scorer = ResponseScorer(engine.engine, throttle, engine.max_model_len)
    queue = itertools.cycle([scoring_task(response, padding, None, 1, 1.0) for response in responses])

    async def backlog() -> None:
        while True:
            result = await scorer.score(next(queue))
            if result.importance is None:
                raise RuntimeError(f"the engine could not score a response: {result.fault}")

    async def generate(response: Response) -> None:
        with throttle.generating():
            await engine.generate(response.token_ids[: response.prompt_length], beside.tokens)

    begin = time.perf_counter()
    requests = [generate(response) for response in itertools.islice(itertools.cycle(responses), beside.requests)]
    generation: asyncio.Future[Any] = asyncio.gather(*requests)
    scoring: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(backlog()) for _ in range(_SCORED_AT_ONCE if beside.share is not None else 0)
    ]
    try:
        await asyncio.wait([generation, *scoring], return_when=asyncio.FIRST_COMPLETED)
        # A backlog never ends by itself: what ended first is generation, or raised.
        for task in (generation, *scoring):
            if task.done():
                task.result()
        beside.seconds.append(time.perf_counter() - begin)
        beside.copies.append(throttle.done)
    finally:
        for task in (generation, *scoring):
            task.cancel()
        await asyncio.gather(generation, *scoring, return_exceptions=True)
    await engine.settle()
