"""Tasks that hang, die or raise end in an error, and the pool goes on."""

import math
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from oar_plugin.runs.math.pool import GuardedPool, TaskFailed


@pytest.fixture(scope="module")
def pool():
    pool = GuardedPool(processes=1, timeout_s=0.5, warm_up=bool)  # a call that does nothing
    yield pool
    pool.close()


def test_a_hanging_task_is_killed_from_any_thread_and_the_next_one_runs(pool):
    assert pool.run(math.isqrt, 49) == 7  # started
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(pool.run, pow, 9, 9**9)  # no signal handler of Python's runs before it is done
        with pytest.raises(TaskFailed, match="pow took longer than"):
            asked.result(30)
    assert pool.run(math.isqrt, 64) == 8


@pytest.mark.parametrize(
    ("function", "args", "cause"),
    [(os._exit, (3,), "process died"), (math.isqrt, (-1,), "ValueError"), (bytes, (2**36,), "MemoryError")],
)
def test_a_task_that_fails_is_reported_and_the_next_one_runs(pool, function, args, cause):
    with pytest.raises(TaskFailed, match=cause):
        pool.run(function, *args)
    assert pool.run(math.isqrt, 81) == 9


def test_processes_that_something_kills_cost_nothing():
    """The kernel where memory is short, or a person. It breaks pebble's pool, and every task after it failed."""
    others = set(multiprocessing.active_children())
    pool = GuardedPool(processes=2, timeout_s=5.0, warm_up=bool)
    try:
        for _ in range(3):
            assert pool.run(math.isqrt, 49) == 7
            killed = set(multiprocessing.active_children()) - others
            assert killed
            for process in killed:
                os.kill(process.pid, signal.SIGKILL)
            for process in killed:
                process.join()
            assert [pool.run(math.isqrt, number**2) for number in range(5)] == [0, 1, 2, 3, 4]
    finally:
        pool.close()
    with pytest.raises(TaskFailed, match="not active"):
        pool.run(math.isqrt, 49)
