"""A process pool that enforces time and memory limits on tasks, and that any thread can call.

Time limits by signal work only in the main thread, but verl computes rewards in other threads. This pool kills the process of
a task that exceeds its time, and starts a new one.
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

# `run` gives up on a stuck pool after this time. No task waits so long for a free process.
_PATIENCE_S = 300.0
_MEMORY_BYTES = 4 * 1024**3
_TASKS_PER_PROCESS = 20_000  # then a new process, because sympy's caches grow


class TaskTimedOut(Exception): ...


class TaskCrashed(Exception): ...


class GuardedPool:
    """Runs functions in other processes; `run` returns or raises in bounded time, whatever the functions do.

    Args:
        processes: number of tasks that run at the same time.
        timeout_s: time limit of a task in seconds; waiting for a free process does not count.
        warm_up: called once in each process before its first task; its time does not count.
    """

    def __init__(self, processes: int, timeout_s: float, warm_up: Callable[[], None]) -> None:
        self._processes, self.timeout_s, self._warm_up = processes, timeout_s, warm_up
        self._closed, self._lock = False, threading.Lock()
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        # Spawn, not fork: a fork would copy locks that the caller's threads hold.
        context = multiprocessing.get_context("spawn")
        return ProcessPool(self._processes, _TASKS_PER_PROCESS, _prepare, [self._warm_up], context)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return `function(*args)`; function and arguments must be picklable.

        Raise TaskTimedOut if it took longer than `timeout_s`, and TaskCrashed if it raised or its process died.
        """
        for attempt in (1, 2):
            try:
                arguments = [self.timeout_s, function, args]
                task = self._running().schedule(_limited, arguments, timeout=self.timeout_s)
                result: Result = task.result(_PATIENCE_S)
                return result
            except FutureTimeoutError as error:
                raise TaskTimedOut(f"{function.__name__} took longer than {self.timeout_s:g} s") from error
            except ProcessExpired as error:
                raise TaskCrashed(f"{function.__name__}: its process died (exit status {error.exitcode})") from error
            except Exception as error:  # whatever the task raised
                # A broken pool is not the task's fault: try once more in a new pool.
                if attempt == 1 and isinstance(error, BrokenProcessPool):
                    continue
                raise TaskCrashed(f"{function.__name__}: {type(error).__name__}: {error}") from error
        raise AssertionError("two attempts neither returned nor raised")

    def _running(self) -> ProcessPool:
        """Return the pool, or a new one if it is broken: a process killed while it accepts a task breaks its pool."""
        with self._lock:
            if not (self._pool.active or self._closed):
                self._pool.stop()
                self._pool = self._start()
            return self._pool

    def close(self) -> None:
        """End all processes, including busy ones."""
        self._closed = True
        self._pool.stop()
        self._pool.join()


def _limited(seconds: float, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    """Run a task in a pool process. If the pool itself has died, a kernel timer ends the process."""
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
