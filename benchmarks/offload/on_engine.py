"""Masked copies on an engine: while it does nothing else, and while it generates."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from benchmarks.offload.engine import Engine
from benchmarks.offload.scoring import PROBE, Response, Run, of_budget, scale_of
from oar_plugin.config import PerturbationConfig
from oar_plugin.hosts.vllm.scorer import ResponseScorer, ScoringTask
from oar_plugin.hosts.vllm.throttle import Throttle

SHARES = {"t0": None, "t15": PerturbationConfig().share_while_generating, "t100": 1.0}
"""Shares of the time in which copies are let in: generation alone, the default, and no limit in time."""

MOST_TOKENS = 256
"""Tokens of each request, at most: enough for the account of the throttle to come to rest, many times over."""

SCORED_AT_ONCE = 4
"""Responses that are scored at a time, over and over: always more copies wait than may run."""


class CountingThrottle(Throttle):
    """`ended` counts the requests of the scorer: copies, and one reference a response."""

    ended = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        async with super().slot():
            yield
        self.ended += 1


class OnEngine:
    """Scores responses as a host would ask for it; copies are let in for `share` of the time while something is generated."""

    def __init__(self, engine: Engine, padding: int, share: float = 1.0) -> None:
        self.engine, self.padding = engine, padding
        self.throttle = CountingThrottle(PerturbationConfig().max_in_flight, share)
        self._scorer = ResponseScorer(engine.engine, self.throttle, engine.max_model_len)

    def score(self, responses: Sequence[Response], at_most: int | None, span: int = 1, budget: float = 1.0) -> Run:
        """All responses at once, every unit; with a budget block by block, as long as it lasts."""
        offered = at_most if budget == 1 else of_budget(at_most)

        async def score() -> None:
            await asyncio.gather(*[self.score_one(run, response, offered, span, budget) for response in responses])

        run = Run()
        self.engine.run(score())
        return run

    async def score_one(
        self, run: Run, response: Response, offered: int | None = None, span: int = 1, budget: float = 1.0
    ) -> None:
        """Raises: RuntimeError, where the engine could not score it."""
        candidate = response.candidate
        task = ScoringTask(
            token_ids=candidate.token_T.tolist(),
            prompt_length=candidate.prompt_length,
            answer_start=candidate.answer_start,
            units=response.units(span, offered),
            response_length=len(response.reasoning),
            probe=PROBE,
            budget=budget,
            replacement_token=self.padding,
            seed=0,
            priority=1,  # behind generation, which has 0
        )
        result = await self._scorer.score(task)
        if result.importance is None:
            raise RuntimeError(f"the engine could not score a response: {result.fault}")
        computed = result.tokens - result.cached_tokens
        scale = scale_of(response, span, offered)
        run.add(response, torch.from_numpy(result.importance), scale, result.copies, computed)
        run.retried += result.retried


async def generate_beside(
    engine: Engine, share: float | None, requests: int, tokens: int, responses: Sequence[Response], padding: int
) -> tuple[float, int]:
    """Generate a batch, with a backlog of scoring unless `share` is None: its seconds, and the copies that ended meanwhile.

    All requests begin together, have one length and end together. Prompts and copies are those of `responses`.
    """
    scorer, queue = OnEngine(engine, padding, share or 0.0), itertools.cycle(responses)

    async def backlog() -> None:
        while True:
            await scorer.score_one(Run(), next(queue))

    async def generate(response: Response) -> None:
        with scorer.throttle.generating():
            await engine.generate(response.candidate, tokens)

    begin = time.perf_counter()
    prompts = itertools.islice(itertools.cycle(responses), requests)
    work: list[asyncio.Future[Any]] = [asyncio.gather(*[generate(response) for response in prompts])]
    work += [asyncio.ensure_future(backlog()) for _ in range(SCORED_AT_ONCE if share is not None else 0)]
    try:
        ended, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        seconds, copies = time.perf_counter() - begin, scorer.throttle.ended
        for task in ended:
            task.result()  # a backlog never ends by itself: what ended is generation, or raises
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    await engine.generate(responses[0].candidate, 1)  # it takes requests in order: what was cancelled is dropped
    return seconds, copies
