"""A vLLM engine that generates, and runs masked copies: while it does nothing else, and while it generates.

It is quiet unless it is asked and gone at the end in every case. Its front end lives in an event loop that runs only while a
method of `Engine` does, so that nothing of it gets into the way of what is measured in between; its worker sits in a process
of its own and sleeps when there is nothing to do.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.offload.scoring import BUDGET, FORWARD_TOKENS, PROBE, Response, Run, Work
from oar_plugin.config import PerturbationConfig
from oar_plugin.hosts.vllm.scorer import ResponseScorer, ScoringTask
from oar_plugin.hosts.vllm.throttle import Throttle
from verl_cpu.session import session

SHARES = {"t0": None, "t15": PerturbationConfig().share_while_generating, "t100": 1.0}
"""Shares of the time in which copies are let in: generation alone, the default, and no limit in time."""
GENERATING = 16
"""Requests that generate at a time, alone and beside scoring."""
MOST_TOKENS = 256
"""Tokens of each request, at most: enough for the account of the throttle to come to rest, many times over."""
SCORED_AT_ONCE = 4
"""Responses that are scored at a time, over and over: always more copies wait than may run."""

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would not carry the session's mark,
    "SPT_NOENV": "1",  # and the title that vLLM gives its processes would overwrite it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",  # vLLM's processes talk to each other: not through a proxy of the user's
    "no_proxy": "127.0.0.1,localhost",
}


class CountingThrottle(Throttle):
    """`ended` counts the requests of the scorer: copies, and one reference a response."""

    ended = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        async with super().slot():
            yield
        self.ended += 1


@dataclass
class Engine:
    """A running `AsyncLLM` with `OutcomeExtension` installed. One caller at a time, from the thread that started it."""

    engine: Any
    max_model_len: int
    padding: int  # what replaces a token
    loop: asyncio.AbstractEventLoop
    processes: Sequence[Any]

    def works(self, tokens: int) -> dict[str, Work]:
        """The engine's candidates, for responses of so many tokens."""
        few = min(MOST_TOKENS, tokens)
        return {
            "g1": partial(self.generate, None, tokens, None),
            "o": self.score,
            "o30": partial(self.score, budget=BUDGET),
            **{letter: partial(self.generate, share, few, GENERATING) for letter, share in SHARES.items()},
        }

    def score(self, responses: Sequence[Response], at_most: int | None, budget: float = 1.0) -> Run:
        """All responses at once, every token, as a host would ask for it; with a budget block by block, as long as it lasts."""
        run, scorer = Run(), self._scorer(1.0)

        async def score() -> None:
            await asyncio.gather(*[self._score(scorer, run, each, at_most, budget) for each in responses])

        self.loop.run_until_complete(score())
        return run

    def generate(
        self, share: float | None, tokens: int, requests: int | None, responses: Sequence[Response], at_most: int | None
    ) -> Run:
        """Generate a batch, with a backlog of scoring unless `share` is None: its seconds, and the copies that ended meanwhile.

        So many requests (None: one a response) begin together, have one length and end together. Prompts and copies are those
        of `responses`. Copies are let in for `share` of the time.
        """
        scorer, queue = self._scorer(share or 0.0), itertools.cycle(responses)
        prompts = itertools.islice(itertools.cycle(responses), requests or len(responses))

        async def backlog() -> None:
            while True:
                await self._score(scorer, Run(), next(queue))

        async def generate(response: Response) -> None:
            with scorer.throttle.generating():
                await self._generate(response, tokens)

        async def batch() -> Run:
            begin = time.perf_counter()
            work: list[asyncio.Future[Any]] = [asyncio.gather(*map(generate, prompts))]
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
            await self._generate(responses[0], 1)  # it takes requests in order: what was cancelled is dropped
            return Run(copies=copies, seconds=seconds)

        return self.loop.run_until_complete(batch())

    def rest(self) -> None:
        """Return when the worker sleeps: it looks for work for a second after the last request before it does."""
        before, quiet_s, until = self.cpu_seconds(), 0.3, time.monotonic() + 5.0
        while time.monotonic() < until:
            time.sleep(quiet_s)
            now = self.cpu_seconds()
            if now - before < 0.1 * quiet_s:  # a tenth of a processor
                return
            before = now

    def cpu_seconds(self) -> float:
        """Processor seconds that the engine's processes have used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes if process.is_running())

    def _scorer(self, share: float) -> Any:
        throttle = CountingThrottle(PerturbationConfig().max_in_flight, share)
        return ResponseScorer(self.engine, throttle, self.max_model_len)

    async def _score(
        self, scorer: Any, run: Run, response: Response, at_most: int | None = None, budget: float = 1.0
    ) -> None:
        """Raises: RuntimeError, where the engine could not score it."""
        candidate = response.candidate
        task = ScoringTask(
            token_ids=candidate.token_T.tolist(),
            prompt_length=candidate.prompt_length,
            answer_start=candidate.answer_start,
            units=response.offered(at_most),
            response_length=len(response.reasoning),
            probe=PROBE,
            budget=budget,
            replacement_token=self.padding,
            seed=0,
            priority=1,  # behind generation, which has 0
        )
        result = await scorer.score(task)
        if result.importance is None:
            raise RuntimeError(f"the engine could not score a response: {result.fault}")
        computed = result.tokens - result.cached_tokens
        run.add(torch.from_numpy(result.importance), result.copies, computed)
        run.retried += result.retried

    async def _generate(self, response: Response, tokens: int) -> None:
        """Exactly so many tokens after its prompt, which shares no cache with earlier ones.

        Raises:
            RuntimeError: the engine returned another number of tokens.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        # There is no tokenizer, and only the end is handed over: the least work around each token.
        only_end = RequestOutputKind.FINAL_ONLY
        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=only_end)
        key, made = uuid.uuid4().hex, 0
        prompt_ids = response.candidate.token_T[: response.candidate.prompt_length].tolist()
        prompt = TokensPrompt(prompt_token_ids=prompt_ids, cache_salt=key)
        async for output in self.engine.generate(prompt, parameters, key):
            made = len(output.outputs[0].token_ids)
        if made != tokens:
            raise RuntimeError(f"the engine generated {made} tokens where {tokens} were asked for")


@contextmanager
def serving(folder: Path, dtype: str, max_model_len: int, padding: int, threads: int, eager: bool) -> Iterator[Engine]:
    """Start an engine on the model saved in `folder`, and end it with all of its processes: after Ctrl-C and SIGTERM too.

    `max_model_len` is the longest sequence, the token that a scoring request generates included. The worker's threads are bound
    to no core, as torch's are not.
    """
    resource_tracker.ensure_running()  # Python's own, which outlives the session
    with ExitStack() as stack:
        stack.callback(multiprocessing.active_children)  # waits for those that have ended
        opened = stack.enter_context(session())
        # While it starts, vLLM swallows `KeyboardInterrupt` and then waits for a process that has taken the same signal.
        interrupt = signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGINT, interrupt)
        environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": str(threads), **opened.environment()}
        stack.enter_context(patch.dict(os.environ, environment))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        stack.callback(lambda: loop.run_until_complete(asyncio.sleep(0.1)))  # what the shutdown has cancelled ends
        arguments = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=0,
            enforce_eager=eager,
            enable_prefix_caching=True,
            block_size=16,  # of the prefix cache: with the 128 of a CPU, copies would share much less of their prefix
            scheduling_policy="priority",
            max_model_len=max_model_len,
            max_num_seqs=256,
            max_num_batched_tokens=FORWARD_TOKENS,
            kv_cache_memory_bytes=2 * 2**30,
            disable_log_stats=True,
            worker_extension_cls="oar_plugin.hosts.vllm.extension.OutcomeExtension",
        )

        async def start() -> AsyncLLM:
            engine = AsyncLLM.from_engine_args(arguments)
            stack.callback(engine.shutdown)
            await engine.collective_rpc("oar_install")
            return engine

        yield Engine(loop.run_until_complete(start()), max_model_len, padding, loop, opened.processes())
