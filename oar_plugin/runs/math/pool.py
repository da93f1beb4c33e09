"""A process pool whose tasks have real time and memory limits, callable from any thread.

Time limits by signal work in a process's main thread only, and verl computes rewards in threads. Here a task that runs too
long is killed with its process, and a new process takes its place.
"""

import multiprocessing
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

Result = TypeVar("Result")

# Longer than a task may wait for its turn, even behind many that are killed: the last resort against a pool that is stuck.
_PATIENCE_S = 300.0
_MEMORY_BYTES = 4 * 1024**3
# sympy's caches grow: start over once in a while.
_TASKS_A_PROCESS = 20_000


class TaskTimedOut(Exception): ...


class TaskCrashed(Exception): ...


class GuardedPool:
    """Runs functions in other processes; whatever they do, `run` returns or raises in bounded time.

    Args:
        processes: tasks that run at a time.
        timeout_s: seconds that a task may run; waiting for a free process does not count.
        warm_up: called once in each process before its first task; its time does not count either.
    """

    def __init__(self, processes: int, timeout_s: float, warm_up: Callable[[], None]) -> None:
        self.timeout_s, self._closed, self._lock = timeout_s, False, threading.Lock()
        # Not forked: the caller has threads, and a fork copies the locks that they hold.
        self._make = partial(
            ProcessPool,
            max_workers=processes,
            max_tasks=_TASKS_A_PROCESS,
            initializer=_prepare,
            initargs=[warm_up],
            context=multiprocessing.get_context("spawn"),
        )
        self._pool = self._make()

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)`, from a module that can be imported, with arguments that can be pickled.

        Raises TaskTimedOut, or TaskCrashed where it raised or its process died; the cause is chained.
        """
        for attempt in (1, 2):
            try:
                future = self._running().schedule(
                    _limited, args=[self.timeout_s, function, args], timeout=self.timeout_s
                )
                result: Result = future.result(_PATIENCE_S)
                return result
            except FutureTimeoutError as error:
                raise TaskTimedOut(f"{function.__name__} took longer than {self.timeout_s:g} s") from error
            except ProcessExpired as error:
                raise TaskCrashed(f"{function.__name__}: its process died (exit status {error.exitcode})") from error
            except Exception as error:  # whatever the task raised
                # A pool that broke is not the task's fault: once more, in a new one.
                if attempt == 1 and isinstance(error, BrokenProcessPool):
                    continue
                raise TaskCrashed(f"{function.__name__}: {type(error).__name__}: {error}") from error
        raise AssertionError("two attempts neither returned nor raised")

    def _running(self) -> ProcessPool:
        """The pool, or a new one: a process that something kills while it takes its task breaks all of it."""
        with self._lock:
            if not (self._pool.active or self._closed):
                self._pool.stop()
                self._pool = self._make()
            return self._pool

    def close(self) -> None:
        """End all processes, also those that are busy."""
        self._closed = True
        self._pool.stop()
        self._pool.join()


def _limited(seconds: float, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    """In the process: the kernel ends it should it outlive its limit, which only happens when nobody is left to kill it."""
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _prepare(warm_up: Callable[[], None]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    # Not a Python handler: that would wait for a long operation on big numbers to end.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warm_up()
