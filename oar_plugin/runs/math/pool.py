"""A process pool that limits time and memory of tasks, in any thread (signals need the main one): it kills the process."""

import multiprocessing
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

Result = TypeVar("Result")

_PATIENCE_S = 300.0  # then `run` gives up on a stuck pool; no task waits so long for a free process
_MEMORY_BYTES = 4 * 1024**3
_TASKS_PER_PROCESS = 20_000  # then a new process, because sympy's caches grow


class TaskFailed(Exception): ...


class GuardedPool:
    """Runs functions in other processes; `run` returns or raises in bounded time, whatever the functions do."""

    def __init__(self, processes: int, timeout_s: float, warm_up: Callable[[], None]) -> None:
        """`timeout_s` limits a task, without its wait for a process. `warm_up` is called in a process before its first task."""
        # Spawn, not fork: a fork would copy locks that the caller's threads hold.
        given = (processes, _TASKS_PER_PROCESS, _prepare, [warm_up], multiprocessing.get_context("spawn"))
        self._new_pool, self._timeout_s = lambda: ProcessPool(*given), timeout_s
        self._pool, self._closed, self._lock = self._new_pool(), False, threading.Lock()

    def run(self, function: Callable[..., Result], *args: Any, attempts: int = 2) -> Result:
        """Return `function(*args)`, all of them picklable. TaskFailed: it took too long or raised, or its process died."""
        with self._lock:
            if not (self._pool.active or self._closed):  # a process killed while it accepts a task breaks its pool
                self._pool.stop()
                self._pool = self._new_pool()
            pool = self._pool
        try:
            future = pool.schedule(_limited, [self._timeout_s, function, args], {}, self._timeout_s)
            until = time.monotonic() + _PATIENCE_S
            while not wait([future], 1.0).done and pool.active and time.monotonic() < until:
                pass
            if not (future.done() or pool.active):  # a pool that breaks now never ends the task
                raise BrokenProcessPool("its processes were killed")
            return future.result(0)
        except FutureTimeoutError as error:
            raise TaskFailed(f"{function.__name__} took longer than {self._timeout_s:g} s") from error
        except ProcessExpired as error:
            raise TaskFailed(f"{function.__name__}: its process died (exit status {error.exitcode})") from error
        except Exception as error:  # whatever the task raised
            if attempts > 1 and isinstance(error, BrokenProcessPool):  # not the task's fault
                return self.run(function, *args, attempts=attempts - 1)
            raise TaskFailed(f"{function.__name__}: {type(error).__name__}: {error}") from error

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
