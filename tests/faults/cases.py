"""Faults of whole runs whose path crosses the plugin's code, and the expected outcomes.

A fault waits for its moment: `generating` comes right after a step's metrics, when the next responses are generated;
`updating` comes right after a step's dump, when advantages are known and the actor's update is running.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest

from tests.faults.run import LiveRun

Outcome = Literal["ends", "goes on"]
Fault = Callable[[LiveRun], None]


@dataclass(frozen=True)
class Case:
    """A fault. `ends` is an end with an error, and a new start continues from the last checkpoint."""

    expected: Outcome
    fault: Fault = lambda run: None  # acts on the running run; without one the run itself has the fault
    overrides: tuple[str, ...] = ()  # of the run with the fault only
    around: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext()  # both runs, by their folder
    same: bool = True  # all steps, also after a new start, have the numbers of an undisturbed run
    metric: str = ""  # it is above 0 in some step
    says: str = ""  # a part of the log


# ---- when


def generating(run: LiveRun) -> None:
    run.wait_for(run.steps)
    done = len(run.steps())
    run.wait_for(lambda: len(run.steps()) > done)


def updating(run: LiveRun) -> None:
    run.wait_for(run.steps)
    number = run.steps()[-1]["step"] + 2
    run.wait_for(lambda: (run.folder / "dump" / f"step_{number:06d}.jsonl").exists())


# ---- what


def signalled(kind: str, number: int, when: Fault = generating) -> Fault:
    def fault(run: LiveRun) -> None:
        when(run)
        run.of(kind)[0].send_signal(number)

    return fault


def stopped(kind: str, seconds: float) -> Fault:
    """Stop a process for a while, like a machine that swaps or a debugger: nothing is lost, and it does not answer."""

    def fault(run: LiveRun) -> None:
        updating(run)
        process = run.of(kind)[0]
        process.suspend()
        time.sleep(seconds)
        with suppress(psutil.NoSuchProcess):  # it has ended with its run
            process.resume()

    return fault


def dumps_have_no_folder(run: LiveRun) -> None:
    """Replace the folder of the dumps by a file."""
    generating(run)
    folder = run.folder / "dump"
    shutil.rmtree(folder)
    folder.touch()


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """Put the folder of the dumps on a disk of its own."""
    if os.getuid() != 0:
        pytest.skip("mounts a disk: for root")
    disk = folder / "dump"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200000000", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def disk_is_full(run: LiveRun) -> None:
    generating(run)
    with suppress(OSError), (run.folder / "dump" / "filler").open("wb", buffering=0) as file:
        while file.write(b"0" * 65536):
            pass


# ---- the table


def _reward(name: str) -> tuple[str, ...]:
    prefix = "reward.custom_reward_function"
    return (f"{prefix}.path=pkg://tests.faults.rewards", f"{prefix}.name={name}")


def _own(name: str) -> tuple[str, ...]:
    return (f"algorithm.oar.importance=python:tests.faults.importances:{name}",)


LOST = "oar/lost_responses"
CASES: dict[str, Case] = {
    "kill -9 while responses are written: driver": Case("ends", signalled("driver", signal.SIGKILL)),
    "kill -9 while responses are written: actor": Case("ends", signalled("actor", signal.SIGKILL)),
    "kill -9 in the update: trainer": Case("ends", signalled("trainer", signal.SIGKILL, updating)),
    "stopped for 30 s in the update: actor": Case("goes on", stopped("actor", 30.0)),
    "Ctrl-C: driver": Case("ends", signalled("driver", signal.SIGINT)),
    "SIGTERM: driver": Case("ends", signalled("driver", signal.SIGTERM)),
    "full disk of dumps": Case("goes on", disk_is_full, around=own_disk, metric="oar/dump_failed"),
    "dumps' folder is gone": Case("goes on", dumps_have_no_folder, metric="oar/dump_failed"),
    "out of memory: importance pass": Case(
        "goes on", overrides=_own("OutOfMemory"), same=False, metric="oar/fallback/out_of_memory"
    ),
    "importance of NaN": Case("goes on", overrides=_own("NotFinite"), same=False, metric="oar/fallback/non_finite"),
    "NaN in all weights": Case("goes on", overrides=("actor_rollout_ref.actor.optim.lr=1e30",), same=False),
    "importance raises": Case("ends", overrides=_own("Raises"), says="that fails"),
    "reward raises": Case("goes on", overrides=_reward("raises"), same=False, metric=LOST, says="a reward that fails"),
    "reward of text": Case("goes on", overrides=_reward("a_string"), same=False, metric=LOST),
    "reward of NaN": Case("goes on", overrides=_reward("not_a_number"), same=False),
    "reward of infinity": Case("goes on", overrides=_reward("infinite"), same=False),
}
