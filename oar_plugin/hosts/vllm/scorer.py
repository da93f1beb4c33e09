"""Scores one response on a vLLM engine: its reference, its masked copies, second attempts, and the requests for them.

**Prefix cache.** Copies share everything before the token that they replace, so they read the cache; that saves half of their
tokens. vLLM turns this off for requests that ask for prompt log-probabilities, and for a reason: of a position that it finds
in the cache it has no hidden state, and it hands back *uninitialised memory* in its row, without an error. So all requests of a
response have a salt of their own (blocks of other requests, or of this response scored before, are out of reach), the worker
counts the rows that it read (`outcomes`), and a copy with a row missing is run a second time, under a new salt and without
the cache.
"""

from __future__ import annotations

import asyncio
import logging
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

from oar_plugin.credit.perturbation import Search, Unit, replacement_seeds
from oar_plugin.credit.probe import Probe
from oar_plugin.hosts.vllm.outcomes import MAX_REFERENCES, TAG, DrawSpec, OutcomeSpec, Spec
from oar_plugin.hosts.vllm.throttle import Throttle

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

Admit = Callable[[], AbstractAsyncContextManager[object]]
"""Held while a request is on its way into the engine. May wait; raises to refuse the request."""

Fault = Literal["timed_out", "too_long", "aborted", "non_finite", "failed"]
"""Out of time; does not fit into the engine with one more token; the engine or its gate turned a request away; a score is not
a finite number; an error, or two attempts without an outcome."""

RESPONSES_AT_ONCE = 16
"""Responses whose copies may be under way together: each keeps a reference in the worker and its prefix in the cache."""

# Requests wait in one queue, first come, first served: between two copies of a response each of the others stores one more
# reference at most.
assert 2 * RESPONSES_AT_ONCE <= MAX_REFERENCES, "a reference must outlive its copies"

DRAWS_AT_ONCE = 32
"""Replacements drawn by one request. A draw takes a hash for every token of the vocabulary, and generation waits for the step
that it is made in: a long response's are made in as many steps. Each request finds in the cache what the last one computed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoringTask:
    """One response to score."""

    token_ids: Sequence[int]  # prompt and response, cut at the end of the answer
    prompt_length: int  # tokens of the prompt in it
    answer_start: int  # index in `token_ids` of the answer's first token; the answer runs to their end
    units: Sequence[Unit]  # positions in the response, before the answer, that a copy replaces at once
    response_length: int  # tokens of the whole response
    probe: Probe
    budget: float  # see `perturbation.copies_of_budget`
    replacement_token: int | None  # what a copy has in place of a token; None: a draw from the model's own prediction
    seed: int  # of these draws (`step_seed`)
    priority: int = 0  # vLLM's, larger is later; other than 0 only for an engine with priority scheduling

    def __post_init__(self) -> None:
        if not self.units or any(self.prompt_length + t >= self.answer_start for unit in self.units for t in unit):
            raise ValueError("a response is scored by units, all of which lie before its answer")


@dataclass
class ScoringResult:
    """The result of a `ScoringTask`."""

    importance: NDArray[np.float32] | None = None  # `[response_length]`, nats, 0 outside of the units
    fault: Fault | None = None  # why there is no importance
    copies: int = 0  # that were scored by the engine
    tokens: int = 0  # prompt tokens of all requests, the reference and second attempts among them
    cached_tokens: int = 0  # how many of these came from the prefix cache
    retried: int = 0  # requests made a second time
    # Seconds since the call began at which each copy was done, ascending.
    done_at: list[float] = field(default_factory=list)


@dataclass
class ResponseScorer:
    """Scores responses on one engine, whose workers have `OutcomeExtension` installed.

    All requests must meet the same workers: with data parallelism inside of the engine a copy may not find its reference, and
    its response is `failed`.
    """

    engine: AsyncLLM
    throttle: Throttle  # every request waits for its turn there, references too
    max_model_len: int  # of the engine
    admit: Admit = nullcontext
    # The adapter that generation uses now, asked once a response; None: there are no adapters.
    lora_request: Callable[[], Awaitable[LoRARequest | None]] | None = None

    def __post_init__(self) -> None:
        self._responses = asyncio.Semaphore(RESPONSES_AT_ONCE)

    async def score(self, task: ScoringTask, timeout_s: float | None = None) -> ScoringResult:
        """Importance of one response.

        Args:
            task: what to score.
            timeout_s: seconds that one request may take in the engine; None: any. Waiting for a turn does not count: how long
                that takes is generation's business.

        Returns:
            A result, with a fault where importance could not be had; raises nothing but cancellation. When this returns
            or is cancelled no request of it is left in the engine; its workers keep its reference until others need the room.
        """
        run = _Run(self, task, timeout_s)
        if len(task.token_ids) + 1 > self.max_model_len:  # a request generates a token, whether it is wanted or not
            return ScoringResult(fault="too_long")
        try:
            async with self._responses:
                run.result.importance = await run.importance()
        except _Failure as failure:
            run.result.fault = failure.fault
        except Exception:
            logger.warning("a response could not be scored on the rollout engine", exc_info=True)
            run.result.fault = "failed"
        return run.result


class _Failure(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class _Run:
    """One call of `score`."""

    def __init__(self, scorer: ResponseScorer, task: ScoringTask, timeout_s: float | None) -> None:
        self.scorer = scorer
        self.task = task
        self.timeout_s = timeout_s
        self.key = uuid.uuid4().hex
        self._began = time.monotonic()
        self.result = ScoringResult()
        self._lora: LoRARequest | None = None
        self._replacements: dict[int, int] = {}  # by position in token_ids

    async def importance(self) -> NDArray[np.float32]:
        """float32 `[response_length]`, finite.

        Raises:
            _Failure: it could not be had.
        """
        task = self.task
        self._lora = await self.scorer.lora_request() if self.scorer.lora_request else None
        await self._reference()
        search = Search(task.units, task.response_length, task.budget)
        while search.wanted:
            search.send(await _all_or_none([self._copy(unit) for unit in search.wanted]))
        assert search.importance is not None
        importance_L: NDArray[np.float32] = search.importance.float().numpy()
        if not np.isfinite(importance_L).all():
            raise _Failure("non_finite")
        return importance_L

    async def _reference(self) -> None:
        """Get the replacement of every token, and keep the response's own outcome in the worker."""
        task = self.task
        at = sorted({task.prompt_length + t for unit in task.units for t in unit})
        if task.replacement_token is not None:
            self._replacements = dict.fromkeys(at, task.replacement_token)
        else:
            seeds = replacement_seeds(torch.tensor(task.token_ids), torch.tensor(at), task.seed).tolist()
            for begin in range(0, len(at), DRAWS_AT_ONCE):
                part = slice(begin, begin + DRAWS_AT_ONCE)
                here = at[part]
                spec = DrawSpec(tuple(here), tuple(task.token_ids[p] for p in here), tuple(seeds[part]))
                # Without the last token, whose row the next request would find in the cache if a block ended with it.
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
        """The drawn tokens, or the score."""
        numbers = await self._attempt(token_ids, spec, self.key, use_cache=True)
        if numbers is None or not math.isfinite(numbers[0]):
            self.result.retried += 1
            numbers = await self._attempt(token_ids, spec, uuid.uuid4().hex, use_cache=False)
        if numbers is None:
            raise _Failure("failed")
        score, rows, *drawn = numbers
        if not math.isfinite(score):
            raise _Failure("non_finite" if rows == len(spec.rows(len(token_ids))) else "failed")
        return drawn if isinstance(spec, DrawSpec) else [score]

    async def _attempt(self, token_ids: Sequence[int], spec: Spec, salt: str, use_cache: bool) -> list[float] | None:
        """The worker's numbers (`OutcomeRecorder.step`); None where they are incomplete or were lost."""
        scorer = self.scorer
        async with scorer.throttle.slot():
            try:
                request = tagged_request(
                    scorer.engine, token_ids, spec, salt, use_cache, self.task.priority, self._lora, scorer.admit
                )
                output: RequestOutput = await asyncio.wait_for(request, self.timeout_s)
            except asyncio.TimeoutError:
                raise _Failure("timed_out") from None
            except Refused as refused:
                raise _Failure("aborted") from refused
        self.result.tokens += len(token_ids)
        self.result.cached_tokens += output.num_cached_tokens or 0
        if was_aborted(output):
            raise _Failure("aborted")
        numbers = numbers_of(output)
        return numbers if len(numbers) == 2 + (len(spec.at) if isinstance(spec, DrawSpec) else 0) else None


async def _all_or_none(coroutines: Sequence[Coroutine[Any, Any, float]]) -> list[float]:
    """Results of all. Where one raises or this is cancelled, the others are cancelled, and have ended on return."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Refused(Exception):
    """`Admit` raised; the request was not made."""


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
    """Run one request to its end. It is aborted when this is cancelled.

    Args:
        engine: with `OutcomeExtension` installed.
        token_ids: the whole prompt.
        salt: blocks of the prefix cache are shared by requests of the same salt only.
        use_cache: read the prefix cache. Rows found there are not computed, see `outcomes`.

    Raises:
        Refused: by `admit`.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=salt)
    sampling_params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,  # the rows are numbers under a token that is not meant
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
                # vLLM takes a request when its outputs are first asked for: by now it is in.
                await gate.aclose()
                final = output
    assert final is not None, "a request that is not aborted ends with an output"
    return final


def was_aborted(output: RequestOutput) -> bool:
    """Whether somebody else ended the request, as hosts do before they exchange weights."""
    return not output.outputs or output.outputs[0].finish_reason == "abort"


def numbers_of(output: RequestOutput) -> list[float]:
    """What `OutcomeRecorder.step` returned for the request; empty where the engine lost it."""
    # The first token of a prompt has no row that predicts it: vLLM puts None there.
    rows = (output.prompt_logprobs or [])[1:]
    return [next(iter(row.values())).logprob for row in rows if row]
