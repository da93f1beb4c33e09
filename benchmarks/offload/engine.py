"""A vLLM engine for the bench: started on a model in a folder, quiet unless it is asked, gone at the end in every case.

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
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

BLOCK_SIZE = 16
"""Tokens of a block of the prefix cache: with vLLM's 128 on a CPU, copies would share much less of their prefix."""

MAX_REQUESTS = 256
STEP_TOKENS = 8192
KV_CACHE_BYTES = 2 * 2**30

# How long vLLM's processes may take to end before they are ended.
_GRACE_S = 15.0

# The engine rests when its processes use less than this share of a processor over a look; it gets so long to come to it.
_QUIET = 0.1
_LOOK_S = 0.3
_REST_S = 5.0

T = TypeVar("T")


class Engine:
    """A running engine with `OutcomeExtension` installed. One caller at a time, from the thread that started it.

    Args:
        engine: vLLM's.
        loop: the loop that it was started in.
        max_model_len: of the engine.
        processes: what vLLM started, as psutil has them.
    """

    def __init__(
        self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop, max_model_len: int, processes: Sequence[Any]
    ) -> None:
        self.engine = engine
        self.max_model_len = max_model_len
        self._loop = loop
        self._processes = processes

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; the engine is served meanwhile."""
        return self._loop.run_until_complete(work)

    async def generate(self, token_ids: Sequence[int], tokens: int) -> None:
        """Generate exactly `tokens` tokens after a prompt that shares nothing with earlier ones.

        Raises:
            RuntimeError: the engine returned another number of tokens.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,  # there is no tokenizer
            output_kind=RequestOutputKind.FINAL_ONLY,  # the least work around each token
        )
        key = uuid.uuid4().hex
        prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=key)
        made = 0
        async for output in self.engine.generate(prompt, parameters, key):
            made = len(output.outputs[0].token_ids)
        if made != tokens:
            raise RuntimeError(f"the engine generated {made} tokens where {tokens} were asked for")

    async def settle(self) -> None:
        """Return when the engine has dropped what was cancelled before: it takes requests in order."""
        await self.generate([1], 1)

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
def serving(folder: Path, dtype: str, max_model_len: int, threads: int, seed: int, eager: bool) -> Iterator[Engine]:
    """Start an engine, and end it with all of its processes: after an exception, Ctrl-C and SIGTERM too.

    Args:
        folder: a saved causal LM; needs no tokenizer.
        dtype: of weights and computation.
        max_model_len: longest sequence, the token that a scoring request generates included.
        threads: CPU threads of the worker. They are bound to no core, as torch's are not.
        seed: of sampling.
        eager: run the model as it is, without compiling it.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment(threads))
        import psutil  # vLLM needs it, this package does not
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        stack.enter_context(terminable())
        loop = asyncio.new_event_loop()
        stack.callback(_close, loop)
        this = psutil.Process()
        before = set(this.children(recursive=True))
        processes: list[Any] = []

        def note_processes() -> None:
            children = this.children(recursive=True)
            processes.extend(p for p in children if p not in before and p not in processes and not _is_tracker(p))

        # Called last to first: what there is is noted, the engine is asked to end, then what is left of it is ended. A worker
        # whose parent has ended is no child of ours any more.
        stack.callback(_end, processes)
        stack.callback(note_processes)

        async def start() -> AsyncLLM:
            engine = AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=str(folder),
                    skip_tokenizer_init=True,
                    dtype=dtype,
                    seed=seed,
                    enforce_eager=eager,
                    enable_prefix_caching=True,
                    block_size=BLOCK_SIZE,
                    scheduling_policy="priority",
                    max_model_len=max_model_len,
                    max_num_seqs=MAX_REQUESTS,
                    max_num_batched_tokens=STEP_TOKENS,
                    kv_cache_memory_bytes=KV_CACHE_BYTES,
                    disable_log_stats=True,
                    worker_extension_cls="oar_plugin.hosts.vllm.extension.OutcomeExtension",
                )
            )
            stack.callback(engine.shutdown)
            note_processes()
            await engine.collective_rpc("oar_install")
            return engine

        yield Engine(loop.run_until_complete(start()), loop, max_model_len, processes)


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one's prompt rows cannot be reached
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's processes talk to each other: not through a proxy of the user's.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    before: Mapping[str, str] = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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
        loop.run_until_complete(asyncio.wait(pending))
    loop.close()


def _is_tracker(process: Any) -> bool:
    """Python's own resource tracker, which lives as long as this process does."""
    import psutil

    with suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return False


def _end(processes: Sequence[Any]) -> None:
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
