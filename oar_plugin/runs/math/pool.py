"""A process pool whose tasks have real time and memory limits, and that any thread can call.

Time limits by signal work in the main thread only, and verl computes rewards in other threads. This pool kills the process of
a task that runs too long, and starts another.
"""

import multiprocessing
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

Result = TypeVar("Result")

# The last resort against a pool that is stuck: longer than a task ever waits for its turn.
_PATIENCE_S = 300.0
_MEMORY_BYTES = 4 * 1024**3
_TASKS_PER_PROCESS = 20_000  # sympy's caches grow


class TaskTimedOut(Exception): ...


class TaskCrashed(Exception): ...


class GuardedPool:
    """Runs functions in other processes; `run` returns or raises in bounded time, whatever they do.

    Args:
        processes: how many tasks run at the same time.
        timeout_s: seconds that a task may run; waiting for a free process does not count.
        warm_up: called once in each process before its first task; its time does not count either.
    """

    def __init__(self, processes: int, timeout_s: float, warm_up: Callable[[], None]) -> None:
        self._processes, self.timeout_s, self._warm_up = processes, timeout_s, warm_up
        self._closed, self._lock = False, threading.Lock()
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        # Spawned: the caller has threads, and a fork would copy the locks that they hold.
        context = multiprocessing.get_context("spawn")
        return ProcessPool(self._processes, _TASKS_PER_PROCESS, _prepare, [self._warm_up], context)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return `function(*args)`; function and arguments can be pickled.

        TaskTimedOut: it took longer than `timeout_s`. TaskCrashed: it raised, or its process died; the cause is chained.
        """
        for attempt in (1, 2):
            try:
                arguments = [self.timeout_s, function, args]
                result: Result = (
                    self._running().schedule(_limited, arguments, timeout=self.timeout_s).result(_PATIENCE_S)
                )
                return result
            except FutureTimeoutError as error:
                raise TaskTimedOut(f"{function.__name__} took longer than {self.timeout_s:g} s") from error
            except ProcessExpired as error:
                raise TaskCrashed(f"{function.__name__}: its process died (exit status {error.exitcode})") from error
            except Exception as error:  # any exception of the task
                # A broken pool is not the task's fault: try once more in a new pool.
                if attempt == 1 and isinstance(error, BrokenProcessPool):
                    continue
                raise TaskCrashed(f"{function.__name__}: {type(error).__name__}: {error}") from error
        raise AssertionError("two attempts neither returned nor raised")

    def _running(self) -> ProcessPool:
        """Return the pool, or a new one: a process that is killed while it takes a task breaks the whole pool."""
        with self._lock:
            if not (self._pool.active or self._closed):
                self._pool.stop()
                self._pool = self._start()
            return self._pool

    def close(self) -> None:
        """End all processes, busy ones too."""
        self._closed = True
        self._pool.stop()
        self._pool.join()


def _limited(seconds: float, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    """Run a task in its process. The kernel ends the process where nobody is left to kill it."""
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _prepare(warm_up: Callable[[], None]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    # The default action, not a Python handler: a handler would wait for a long operation on big numbers.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warm_up()
