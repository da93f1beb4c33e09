"""A vLLM engine: started on a model in a folder, quiet unless it is asked, gone at the end in every case.

The engine's front end lives in an event loop that runs only while `Engine.run` does, so that nothing of it gets into the way
of what is measured in between; its worker sits in a process of its own and sleeps when there is nothing to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from oar_plugin.passes.masked_copies import Candidate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

BLOCK_SIZE = 16
"""Tokens of a block of the prefix cache: with vLLM's 128 on a CPU, copies would share much less of their prefix."""

MAX_REQUESTS = 256
STEP_TOKENS = 8192

_GRACE_S = 15.0  # for vLLM's processes to end before they are ended

# The engine rests when its processes use less than this share of a processor over a look; it gets so long to come to it.
_QUIET, _LOOK_S, _REST_S = 0.1, 0.3, 5.0

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one's prompt rows cannot be reached
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",  # vLLM's processes talk to each other: not through a proxy of the user's
    "no_proxy": "127.0.0.1,localhost",
}

T = TypeVar("T")


class Engine:
    """A running engine with `OutcomeExtension` installed. One caller at a time, from the thread that started it."""

    def __init__(
        self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop, max_model_len: int, processes: Sequence[Any]
    ) -> None:
        self.engine, self.max_model_len = engine, max_model_len
        self._loop, self._processes = loop, processes

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; the engine is served meanwhile."""
        return self._loop.run_until_complete(work)

    async def generate(self, candidate: Candidate, tokens: int) -> None:
        """Generate exactly `tokens` tokens after its prompt, which shares no cache with earlier ones.

        Raises:
            RuntimeError: the engine returned another number of tokens.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        # There is no tokenizer, and only the end is handed over: the least work around each token.
        parameters = SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        key, made = uuid.uuid4().hex, 0
        prompt_ids = candidate.token_T[: candidate.prompt_length].tolist()
        async for output in self.engine.generate(
            TokensPrompt(prompt_token_ids=prompt_ids, cache_salt=key), parameters, key
        ):
            made = len(output.outputs[0].token_ids)
        if made != tokens:
            raise RuntimeError(f"the engine generated {made} tokens where {tokens} were asked for")

    def rest(self) -> None:
        """Return when the worker sleeps: it looks for work for a second after the last request before it does."""
        before, until = self.cpu_seconds(), time.monotonic() + _REST_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = self.cpu_seconds()
            if now - before < _QUIET * _LOOK_S:
                return
            before = now

    def cpu_seconds(self) -> float:
        """Processor seconds that the engine's processes have used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes if process.is_running())


@contextmanager
def serving(folder: Path, dtype: str, max_model_len: int, threads: int, eager: bool) -> Iterator[Engine]:
    """Start an engine on the model saved in `folder`, and end it with all of its processes: after Ctrl-C and SIGTERM too.

    `max_model_len` is the longest sequence, the token that a scoring request generates included. The worker's threads are bound
    to no core, as torch's are not.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, OMP_NUM_THREADS=str(threads), **_ENVIRONMENT))
        import psutil  # vLLM needs it, this package does not
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        stack.enter_context(terminable())
        loop = asyncio.new_event_loop()
        stack.callback(_close, loop)
        resource_tracker.ensure_running()  # Python's own, which lives as long as this process does
        this, processes = psutil.Process(), list[Any]()
        before = this.children(recursive=True)

        def note_processes() -> None:
            processes.extend(p for p in this.children(recursive=True) if p not in [*before, *processes])

        # Called last to first: what there is is noted, the engine is asked to end, then what is left of it is ended. A worker
        # whose parent has ended is no child of ours any more.
        stack.callback(_end, processes)
        stack.callback(note_processes)
        arguments = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=0,
            enforce_eager=eager,
            enable_prefix_caching=True,
            block_size=BLOCK_SIZE,
            scheduling_policy="priority",
            max_model_len=max_model_len,
            max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_memory_bytes=2 * 2**30,
            disable_log_stats=True,
            worker_extension_cls="oar_plugin.hosts.vllm.extension.OutcomeExtension",
        )

        async def start() -> AsyncLLM:
            engine = AsyncLLM.from_engine_args(arguments)
            stack.callback(engine.shutdown)
            note_processes()
            await engine.collective_rpc("oar_install")
            return engine

        yield Engine(loop.run_until_complete(start()), loop, max_model_len, processes)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and Ctrl-C unwind the stack, once: what follows the first one must not keep the engine from ending.

    SIGTERM would end this process and leave vLLM's behind. And while it starts, vLLM swallows `KeyboardInterrupt` and then
    waits for a process that has taken the same signal and is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        loop.run_until_complete(asyncio.wait(pending, timeout=_GRACE_S))
    loop.close()


def _end(processes: Sequence[Any]) -> None:
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
