"""The ways to run the masked copies of OAR-P that `oar bench perturbation` compares, and what each computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.offload.engine import Engine
from benchmarks.responses import Response
from benchmarks.step.passes import Passes
from benchmarks.step.published import copies_that_fit, published_perturbation
from oar_plugin.config import PerturbationConfig
from oar_plugin.credit.perturbation import Search
from oar_plugin.credit.probe import Probe
from oar_plugin.hosts.vllm.scorer import ResponseScorer, ScoringResult, ScoringTask
from oar_plugin.hosts.vllm.throttle import Throttle
from oar_plugin.passes.masked_copies import Candidate, MaskedCopies, Replacements

BUDGET = 0.3
SPAN = 8
PROBE: Probe = "answer_mean"

FORWARD_TOKENS = 8192
"""Tokens of one forward of `MaskedCopies`: as many as a step of the engine has."""

_BEHIND_GENERATION = 1
"""vLLM's priority of a copy; generation has 0, and less is sooner."""


@dataclass
class Run:
    """What one run over some responses did. The defaults are those of work that has no copies.

    Attributes:
        importance: one a response, `[L]`.
        copies: that were scored.
        tokens: that were computed, references included.
        reference_tokens: of these, those that every response needs once, however many copies it has.
        fixed_s: seconds of the run that do not grow with the copies either.
        every: copies that there would have been if all units had been measured, over `copies`.
        retried: requests that had to be made twice.
    """

    importance: list[Tensor]
    copies: int = 0
    tokens: int = 0
    reference_tokens: int = 0
    fixed_s: float = 0.0
    every: float = 1.0
    retried: int = 0

    @property
    def all_copies(self) -> float:
        """Copies of all units."""
        return self.copies * self.every

    @property
    def all_tokens(self) -> float:
        """Tokens of all units."""
        return self.reference_tokens + (self.tokens - self.reference_tokens) * self.every

    def all_seconds(self, seconds: float) -> float:
        """What all units would have taken, from what the measured ones took: seconds grow with tokens."""
        if self.every == 1:
            return seconds
        return self.fixed_s + (seconds - self.fixed_s) * self.all_tokens / self.tokens


Work = Callable[[Sequence[Response], int | None], Run]
"""Scores some responses, each with at most so many copies (None: all that the candidate wants)."""


class LocalScoring:
    """Candidates in plain PyTorch.

    Args:
        passes: the model and the batch that the responses are of.
        padding: the token that replaces others.
        at_once: copies in one forward of the published procedure. None: as many as fit into memory when it first runs.
    """

    def __init__(self, passes: Passes, padding: int, at_once: int | None = None) -> None:
        self.passes = passes
        self.padding = padding
        self.at_once = at_once

    def published(self, responses: Sequence[Response], at_most: int | None) -> Run:
        """The published procedure."""
        run = Run([])
        if self.at_once is None:
            self.at_once = copies_that_fit(self.passes.model, len(responses[0].token_ids))
        for response in responses:
            units = response.units(1, at_most)
            length = len(response.token_ids)
            shifted = [tuple(response.prompt_length + t for t in unit) for unit in units.chosen]
            scores = published_perturbation(
                self.passes.model, self._tokens(response), shifted, response.answer_start, self.padding, self.at_once
            )
            _account(run, units.every / len(units.chosen), len(units.chosen), length * (1 + len(units.chosen)), length)
            run.importance.append(_finished(Search(units.chosen, response.length), scores.tolist()))
        return run

    def exact(self, responses: Sequence[Response], at_most: int | None, span: int = 1) -> Run:
        """`MaskedCopies`, every unit."""
        run = Run([])
        for response in responses:
            units = response.units(span, at_most)
            self._search(run, response, Search(units.chosen, response.length), units.every / len(units.chosen))
        return run

    def hybrid(self, responses: Sequence[Response], at_most: int | None) -> Run:
        """The gradient of every token, then `MaskedCopies` of the units with the largest.

        Where not all of the batch is wanted, the gradient is that of one micro-batch.
        """
        run = Run([])
        begin = time.perf_counter()
        limit = None if len(responses) == len(self.passes.batch) else 1
        gradient_BL = torch.cat(self.passes.importance_only(limit).importance).cpu()
        run.fixed_s = time.perf_counter() - begin
        for response in responses:
            units = response.units(1, of_budget(at_most))
            gradient_L = gradient_BL[response.row, response.prompt_length :].tolist()
            search = Search(units.chosen, response.length, BUDGET, gradient_L)
            self._search(run, response, search, units.every / len(units.chosen))
        return run

    def _search(self, run: Run, response: Response, search: Search, every: float) -> None:
        copies = MaskedCopies(self.passes.model, PROBE, Replacements(self.padding), FORWARD_TOKENS)
        candidate = Candidate(self._tokens(response), response.prompt_length, response.answer_start)
        wanted = search.wanted
        run.importance.append(_finished(search, copies.run(candidate, wanted)))
        _account(run, every, len(wanted), copies.tokens, len(response.token_ids))

    def _tokens(self, response: Response) -> Tensor:
        return self.passes.batch.token_BL[response.row, : len(response.token_ids)]


class OffloadedScoring:
    """Candidates on the engine, which does nothing else meanwhile. All responses at once, as a host hands them over.

    Args:
        engine: a running one.
        padding: the token that replaces others.

    Raises:
        RuntimeError: by all candidates, when the engine could not score a response.
    """

    def __init__(self, engine: Engine, padding: int) -> None:
        self.engine = engine
        self.padding = padding
        self._throttle = Throttle(PerturbationConfig().max_in_flight, share=1.0)
        self._scorer = ResponseScorer(engine.engine, self._throttle, engine.max_model_len)

    def exact(self, responses: Sequence[Response], at_most: int | None, span: int = 1) -> Run:
        """Every unit."""
        return self._run(responses, at_most, span, 1.0)

    def budget(self, responses: Sequence[Response], at_most: int | None) -> Run:
        """Block by block, as long as the budget lasts."""
        return self._run(responses, of_budget(at_most), 1, BUDGET)

    def _run(self, responses: Sequence[Response], at_most: int | None, span: int, budget: float) -> Run:
        tasks = [scoring_task(response, self.padding, at_most, span, budget) for response in responses]

        async def all_of_them() -> list[ScoringResult]:
            return await asyncio.gather(*[self._scorer.score(task) for task in tasks])

        run = Run([])
        for response, task, result in zip(responses, tasks, self.engine.run(all_of_them()), strict=True):
            if result.importance is None:
                raise RuntimeError(f"the engine could not score a response: {result.fault}")
            every = response.units(span, None).every / len(task.units)
            computed = result.tokens - result.cached_tokens
            _account(run, every, result.copies, computed, len(response.token_ids))
            run.importance.append(torch.from_numpy(result.importance))
            run.retried += result.retried
        return run


def scoring_task(response: Response, padding: int, at_most: int | None, span: int, budget: float) -> ScoringTask:
    """What a host would ask the engine for; `at_most` units of it."""
    return ScoringTask(
        token_ids=response.token_ids,
        prompt_length=response.prompt_length,
        answer_start=response.answer_start,
        units=response.units(span, at_most).chosen,
        response_length=response.length,
        probe=PROBE,
        budget=budget,
        replacement_token=padding,
        seed=0,
        priority=_BEHIND_GENERATION,
    )


def of_budget(copies: int | None) -> int | None:
    """How many units to offer so that the budget makes that many copies of them."""
    return None if copies is None else max(copies, round(copies / BUDGET))


def _account(run: Run, every: float, copies: int, tokens: int, reference_tokens: int) -> None:
    run.every = every  # responses of a batch have as many units each
    run.copies += copies
    run.tokens += tokens
    run.reference_tokens += reference_tokens


def _finished(search: Search, scores: list[float]) -> Tensor:
    """Importance from the scores of a search that takes one round: all units, or those with the largest gradient."""
    search.send(scores)
    assert search.importance is not None
    return search.importance
