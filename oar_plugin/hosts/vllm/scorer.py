"""Scores one response on a vLLM engine: requests its reference and its masked copies, and repeats failed requests.

**Prefix cache.** A copy equals its response before the token that it replaces, so it reads this part from the cache.
This saves half of the copies' tokens. By default vLLM turns the cache off for requests with prompt log-probabilities,
because a cached position has no hidden state: its row would be *uninitialised memory*, without an error. So every
scoring of a response has its own cache salt: its requests cannot read blocks of other or earlier scorings. The
worker counts the rows that it read (`outcomes`). A copy with a missing row is run again, with a new salt and no cache.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from oar_plugin.credit.perturbation import Unit, importance_of_units, replacement_seeds
from oar_plugin.credit.probe import Probe
from oar_plugin.hosts.vllm.outcomes import MAX_REFERENCES, TAG, DrawSpec, OutcomeSpec, Spec
from oar_plugin.hosts.vllm.throttle import Throttle
from oar_plugin.output import logger

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

Admit = Callable[[], AbstractAsyncContextManager[object]]
"""Returns a context, held until the engine has the request. Entering may wait, or raise to refuse the request."""

Fault = Literal["timed_out", "too_long", "aborted", "non_finite", "failed"]
"""In this order: a request took too long; the tokens and one more exceed `max_model_len`; the engine or `Admit` refused
or aborted a request; a score is not finite; any other error, or two attempts without an outcome."""

RESPONSES_AT_ONCE = 16  # most that are scored at once. Each has a reference in the worker, and its prefix in the cache
# Requests wait in one first-in, first-out queue. So between two copies of one response, each of the others stores at
# most one more reference.
assert 2 * RESPONSES_AT_ONCE <= MAX_REFERENCES, "a reference must be kept until its copies are done"

DRAWS_AT_ONCE = 32
"""Maximum number of replacements drawn by one request. A draw hashes every token of the vocabulary, and generation
waits for that engine step. So a long response needs several requests; each reads the cache that the last one filled."""


@dataclass(frozen=True)
class ScoringTask:
    token_ids: Sequence[int]  # prompt and response, cut at the end of the answer
    prompt_length: int  # number of prompt tokens in `token_ids`
    answer_start: int  # index in `token_ids` of the answer's first token; `token_ids` end with the answer
    units: Sequence[Unit]  # each: positions in the response, before the answer, that one copy replaces together
    response_length: int  # tokens of the whole response
    probe: Probe
    replacement_token: int | None  # replaces tokens in copies; None: replacements are drawn from the model's prediction
    seed: int  # seed of these draws (`step_seed`)
    priority: int = 0  # of vLLM; a larger number runs later. An engine without priority scheduling needs 0


@dataclass
class ScoringResult:
    importance: NDArray[np.float32] | None = None  # `[response_length]`, nats, 0 outside of the units
    fault: Fault | None = None  # why there is no importance
    copies: int = 0  # number of copies that the engine scored
    tokens: int = 0  # prompt tokens of all requests, including the reference and second attempts
    cached_tokens: int = 0  # how many of these came from the prefix cache
    retried: int = 0  # requests made a second time
    done_at: list[float] = field(default_factory=list)  # each copy's seconds from the start of the call; ascending


@dataclass
class ResponseScorer:
    """Scores responses on one engine, whose workers have `OutcomeExtension` installed.

    All requests must reach the same workers. With data parallelism inside the engine, a copy may not find its
    reference, and the result of its response then has the fault `failed`.
    """

    engine: AsyncLLM
    throttle: Throttle  # all requests wait in it for their turn, also those for references
    max_model_len: int  # the engine's setting with this name
    admit: Admit = nullcontext
    # Returns the LoRA adapter that generation uses now; called once per response. None: there are no adapters.
    lora_request: Callable[[], Awaitable[LoRARequest | None]] | None = None
    _responses: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RESPONSES_AT_ONCE), init=False)

    async def score(self, task: ScoringTask, timeout_s: float | None = None) -> ScoringResult:
        """Compute the importance of one response. The result has a fault if that failed; only cancellation is raised.

        `timeout_s` is the time limit of one request in the engine, in seconds; None: no limit. Waiting in the throttle does not
        count, because its duration depends on generation. When this returns or is cancelled, no request of it is left in the
        engine. Newer references later replace its reference.
        """
        run = _Run(self, task, timeout_s)
        if len(task.token_ids) + 1 > self.max_model_len:  # every request generates one token
            return ScoringResult(fault="too_long")
        try:
            async with self._responses:
                run.result.importance = await run.importance()
        except _Failure as failure:
            run.result.fault = failure.args[0]
        except Exception:
            logger.warning("a response could not be scored on the rollout engine", exc_info=True)
            run.result.fault = "failed"
        return run.result


class _Failure(Exception):
    """Its argument is the `Fault`."""


class _Run:
    """State of one call of `ResponseScorer.score`."""

    def __init__(self, scorer: ResponseScorer, task: ScoringTask, timeout_s: float | None) -> None:
        self.scorer, self.task, self.timeout_s = scorer, task, timeout_s
        self.key = uuid.uuid4().hex
        self._began = time.monotonic()
        self.result = ScoringResult()
        self._lora: LoRARequest | None = None
        self._replacements: dict[int, int] = {}  # position in token_ids -> replacement token

    async def importance(self) -> NDArray[np.float32]:
        """Return the importance, float32 `[response_length]`, finite. _Failure: it could not be computed."""
        task = self.task
        self._lora = await self.scorer.lora_request() if self.scorer.lora_request else None
        await self._reference()
        scores = await _all_or_none([self._copy(unit) for unit in task.units])
        importance_L: NDArray[np.float32] = importance_of_units(task.units, scores, task.response_length).numpy()
        if not np.isfinite(importance_L).all():
            raise _Failure("non_finite")
        return importance_L

    async def _reference(self) -> None:
        """Get the replacement of every token in a unit, and make the worker store the reference."""
        task = self.task
        at = sorted({task.prompt_length + t for unit in task.units for t in unit})
        if task.replacement_token is not None:
            self._replacements = dict.fromkeys(at, task.replacement_token)
        else:
            seeds = replacement_seeds(torch.tensor(task.token_ids), torch.tensor(at), task.seed).tolist()
            for begin in range(0, len(at), DRAWS_AT_ONCE):
                here, its_seeds = (numbers[begin : begin + DRAWS_AT_ONCE] for numbers in (at, seeds))
                spec = DrawSpec(tuple(here), tuple(task.token_ids[p] for p in here), tuple(its_seeds))
                # Ends before the token at `here[-1]`: if it were cached, the next request could not read its row.
                drawn = await self._attempt_twice(task.token_ids[: here[-1]], spec)
                self._replacements.update(zip(here, map(int, drawn), strict=True))
        await self._attempt_twice(task.token_ids, OutcomeSpec(self.key, "reference", task.probe, task.answer_start))

    async def _copy(self, unit: Unit) -> float:
        """The score of the copy in which `unit` is replaced."""
        task = self.task
        token_ids = list(task.token_ids)
        for t in unit:
            token_ids[task.prompt_length + t] = self._replacements[task.prompt_length + t]
        if token_ids == list(task.token_ids):
            return 0.0
        (score,) = await self._attempt_twice(token_ids, OutcomeSpec(self.key, "copy", task.probe, task.answer_start))
        self.result.copies += 1
        self.result.done_at.append(time.monotonic() - self._began)
        return score

    async def _attempt_twice(self, token_ids: Sequence[int], spec: Spec) -> list[float]:
        """Return the drawn tokens, or `[score]`. A request without a finite result is repeated without the cache."""
        score, rows, *drawn = await self._attempt(token_ids, spec, use_cache=True)
        if not math.isfinite(score):
            self.result.retried += 1
            score, rows, *drawn = await self._attempt(token_ids, spec, use_cache=False)
        if not math.isfinite(score):
            raise _Failure("non_finite" if rows == len(spec.rows(len(token_ids))) else "failed")
        return drawn if isinstance(spec, DrawSpec) else [score]

    async def _attempt(self, token_ids: Sequence[int], spec: Spec, use_cache: bool) -> list[float]:
        """Return the numbers that `OutcomeRecorder.step` returned for a request; NaN if some of them are missing."""
        scorer, salt = self.scorer, self.key if use_cache else uuid.uuid4().hex
        async with scorer.throttle.slot():
            try:
                how = salt, use_cache, self.task.priority, self._lora, scorer.admit
                request = tagged_request(scorer.engine, token_ids, spec, *how)
                output: RequestOutput = await asyncio.wait_for(request, self.timeout_s)
            except asyncio.TimeoutError:
                raise _Failure("timed_out") from None
            except Refused as refused:
                raise _Failure("aborted") from refused
        self.result.tokens += len(token_ids)
        self.result.cached_tokens += output.num_cached_tokens or 0
        if not output.outputs or output.outputs[0].finish_reason == "abort":  # by a host before an exchange of weights
            raise _Failure("aborted")
        numbers = numbers_of(output)
        expected = 2 + (len(spec.at) if isinstance(spec, DrawSpec) else 0)
        return numbers if len(numbers) == expected else [math.nan] * 2


async def _all_or_none(coroutines: Sequence[Coroutine[Any, Any, float]]) -> list[float]:
    """Return all results. If one raises or this call is cancelled, cancel the others and wait until they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Refused(Exception):
    """`Admit` raised an exception, so the request was not sent."""


async def tagged_request(
    engine: AsyncLLM,
    token_ids: Sequence[int],
    spec: Spec,
    salt: str,
    use_cache: bool = True,
    priority: int = 0,
    lora_request: LoRARequest | None = None,
    admit: Admit = nullcontext,
) -> RequestOutput:
    """Run one request to its end. If this call is cancelled, the request is aborted. Raises `Refused`.

    Only requests with the same `salt` share blocks of the prefix cache. Without `use_cache`, the request reads none of it.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=salt)
    sampling_params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,  # the rows contain numbers; their token ids have no meaning
        prompt_logprobs=0,
        skip_reading_prefix_cache=not use_cache,
        extra_args={TAG: asdict(spec)},
    )
    final: RequestOutput | None = None
    async with AsyncExitStack() as gate:
        try:
            await gate.enter_async_context(admit())
        except Exception as error:
            raise Refused from error
        outputs = engine.generate(
            prompt, sampling_params, f"oar-{uuid.uuid4().hex}", lora_request=lora_request, priority=priority
        )
        async with aclosing(outputs):
            async for output in outputs:
                # vLLM adds a request to the engine when its first output is requested, so here it has been added.
                await gate.aclose()
                final = output
    assert final is not None, "a request that is not aborted ends with an output"
    return final


def numbers_of(output: RequestOutput) -> list[float]:
    """Return the numbers that `OutcomeRecorder.step` returned for the request; empty if the engine lost them."""
    # No row predicts the first token of a prompt; vLLM returns None in its place.
    rows = (output.prompt_logprobs or [])[1:]
    return [next(iter(row.values())).logprob for row in rows if row]
