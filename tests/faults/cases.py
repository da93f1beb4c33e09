"""The faults of whole runs, and the expected outcomes.

A fault waits for its moment: `generating` comes right after a step's metrics, when the next responses are generated;
`updating` comes right after a step's dump, when advantages are known and the actor's update is running.
"""

import os
import resource
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

Outcome = Literal["ends", "goes on", "waits for ever"]
Fault = Callable[[LiveRun], None]


def none(run: LiveRun) -> None:
    """Only wait for the first step: the run itself has the fault."""
    while "Training Progress" not in run.log() and not run.ended():
        time.sleep(0.2)


@dataclass(frozen=True)
class Case:
    """A fault. `ends` is an end with an error, and a new start continues from the last checkpoint; a run `waits for ever` where
    the host has no time limit."""

    expected: Outcome
    fault: Fault = none  # acts on the running run
    repair: Fault = lambda run: None  # acts before the new start
    overrides: tuple[str, ...] = ()  # of the run with the fault only
    # A context around both runs, made from their folder; it yields variables of the first run's environment.
    around: Callable[[Path], AbstractContextManager[dict[str, str]]] = lambda folder: nullcontext({})
    same: bool | None = True  # all steps, also after a new start, have the numbers of an undisturbed run; None: either
    metric: str = ""  # it is above 0 in some step
    says: str = ""  # a part of the log
    leaves: bool = False  # processes of the run may outlive a killed driver
    alone: bool = False  # needs a run of its own: it has `overrides` or `around`, or it stays in the folder


# ---- when


def generating(run: LiveRun) -> None:
    done = len(run.steps())
    run.wait_for(lambda: len(run.steps()) > done)


def updating(run: LiveRun) -> None:
    run.wait_for(run.steps)
    number = run.steps()[-1]["step"] + 2
    run.wait_for(lambda: (run.folder / "dump" / f"step_{number:06d}.jsonl").exists())


# ---- what


def signalled(kind: str, number: int, when: Fault) -> Fault:
    def fault(run: LiveRun) -> None:
        when(run)
        run.of(kind)[0].send_signal(number)

    return fault


def killed_and_watched(kind: str, seconds: float) -> Fault:
    """Kill a process that others wait for; the run may end within these seconds."""

    def fault(run: LiveRun) -> None:
        signalled(kind, signal.SIGKILL, generating)(run)
        run.wait_to_end(seconds)

    return fault


def stopped(kind: str, seconds: float, when: Fault = generating) -> Fault:
    """Stop a process for a while, like a machine that swaps or a debugger: nothing is lost, and it does not answer."""

    def fault(run: LiveRun) -> None:
        when(run)
        process = run.of(kind)[0]
        process.suspend()
        time.sleep(seconds)
        with suppress(psutil.NoSuchProcess):  # it has ended with its run
            process.resume()

    return fault


def no_more_memory(kind: str, when: Fault) -> Fault:
    """Limit the address space of a process to its present size."""

    def fault(run: LiveRun) -> None:
        when(run)
        process = run.of(kind)[0]
        process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms,) * 2)

    return fault


def no_more_files(kind: str, when: Fault) -> Fault:
    """Let no file of a process grow, as on a full disk."""

    def fault(run: LiveRun) -> None:
        when(run)
        run.of(kind)[0].rlimit(resource.RLIMIT_FSIZE, (0, 0))

    return fault


def dumps_have_no_room(run: LiveRun) -> None:
    """Replace the folder of the dumps by a file."""
    generating(run)
    folder = run.folder / "dump"
    shutil.rmtree(folder)
    folder.touch()


def _killed(run: LiveRun) -> int:
    """Kill the driver; return the step of the newest checkpoint."""
    signalled("driver", signal.SIGKILL, generating)(run)
    run.wait_to_end()
    return run.checkpointed()


def newest_checkpoint_is_half_written(run: LiveRun) -> None:
    """Halve a file of the newest checkpoint, like a power cut."""
    (weights,) = (run.folder / "checkpoints" / f"global_step_{_killed(run)}" / "actor").glob("model_world_size_*.pt")
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)


def the_one_before_is_named(run: LiveRun) -> None:
    """Check that a run cannot start from it, and name the checkpoint before it, as a user does."""
    with LiveRun(run.folder, run.assets, run.overrides, name="from_a_half") as half:
        half.wait_to_end()
    assert half.status() != 0
    assert not half.steps()
    assert "failed finding central directory" in half.log()
    run.tracker.write_text(str(run.checkpointed() - 1), encoding="utf-8")


def half_a_checkpoint_lies_there(run: LiveRun) -> None:
    """Leave the folder of an incomplete checkpoint, like a driver that is killed while it saves."""
    half = run.folder / "checkpoints" / f"global_step_{_killed(run) + 1}" / "actor"
    half.mkdir(parents=True, exist_ok=True)
    (half / "model_world_size_1_rank_0.pt").write_bytes(b"half")


def own_disk(name: str) -> Callable[[Path], AbstractContextManager[dict[str, str]]]:
    """Put a folder of the run on a disk of its own."""

    @contextmanager
    def around(folder: Path) -> Iterator[dict[str, str]]:
        if os.getuid() != 0:
            pytest.skip("mounts a disk: for root")
        disk = folder / name
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
        try:
            yield {}
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)

    return around


@contextmanager
def own_disk_of_metrics(folder: Path) -> Iterator[dict[str, str]]:
    """Put the file of verl's logger on a disk of its own."""
    with own_disk("metrics")(folder) as told:
        (folder / "run1.jsonl").symlink_to(folder / "metrics" / "run1.jsonl")
        yield told


def disk_is_full(name: str) -> Fault:
    def fault(run: LiveRun) -> None:
        generating(run)
        with suppress(OSError), (run.folder / name / "filler").open("wb", buffering=0) as file:
            while file.write(b"0" * 65536):
                pass

    return fault


def disk_has_room(run: LiveRun) -> None:
    (run.folder / "checkpoints" / "filler").unlink()


@contextmanager
def clock(folder: Path) -> Iterator[dict[str, str]]:
    """The run's processes add the offset in a file to the machine's clock; monotonic clocks stay as they are."""
    package = Path(pytest.importorskip("libfaketime", reason="pip install libfaketime").__file__).parent
    library = str(package / "vendor" / "libfaketime" / "src" / "libfaketime.so.1")
    (folder / "clock").write_text("+3600", encoding="utf-8")
    environment = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    told = subprocess.run(["date", "+%s"], env=os.environ | environment, check=True, capture_output=True).stdout
    assert int(told) > time.time() + 3000
    (folder / "clock").write_text("+0", encoding="utf-8")
    try:
        yield environment
    finally:
        for name in Path("/dev/shm").glob("*faketime_*"):  # killed processes left them
            name.unlink()


def clock_steps(by: str) -> Fault:
    def fault(run: LiveRun) -> None:
        generating(run)
        (run.folder / "clock").write_text(by, encoding="utf-8")

    return fault


# ---- the table

_KILLED: dict[str, Outcome] = {
    # Ray tells whoever waits for an actor that it is gone.
    "engine core": "ends",
    "rollout server": "ends",
    "load balancer": "ends",
    "reward loop": "ends",
    "actor": "ends",
    "trainer": "ends",
    "raylet": "ends",
    "driver": "ends",
    # verl counts its responses as running, and asks nobody.
    "agent loop": "waits for ever",
    # Their clients wait on sockets without a time limit.
    "storage": "waits for ever",
    "storage controller": "waits for ever",
}
SOME_RESPONSES_FAIL = "load balancer"
"""An engine still answers the requests that it has. verl 0.9.1 trains on those responses of a group that arrived, and ends
where a group has none: the last step may have fewer responses."""

STOPPED_S = 30.0
"""Longer than anything of OAR's own waits; Ray gives a raylet or GCS that does not answer 60 s or more."""
LONG_S = 150.0
DISK_BYTES = 200_000_000


def _rewards(name: str) -> tuple[str, ...]:
    prefix = "reward.custom_reward_function"
    return (f"{prefix}.path=pkg://tests.faults.rewards", f"{prefix}.name={name}")


def _own(name: str) -> tuple[str, ...]:
    return (f"algorithm.oar.importance=python:tests.faults.importances:{name}",)


CASES: dict[str, Case] = {
    **{
        f"kill -9 while responses are written: {kind}": Case(
            expected, signalled(kind, signal.SIGKILL, generating), same=None if kind == SOME_RESPONSES_FAIL else True
        )
        for kind, expected in _KILLED.items()
    },
    # Ray's processes work on for a minute, in which they wait for it to return.
    "kill -9: gcs": Case("ends", killed_and_watched("gcs", LONG_S)),
    **{
        f"kill -9 in the update: {kind}": Case(_KILLED[kind], signalled(kind, signal.SIGKILL, updating))
        for kind in ("actor", "trainer", "driver")
    },
    # It sleeps then; verl waits for it at its wake-up.
    "kill -9 in the update: engine core": Case("waits for ever", signalled("engine core", signal.SIGKILL, updating)),
    **{
        f"stopped for {STOPPED_S:.0f} s: {kind}": Case("goes on", stopped(kind, STOPPED_S))
        for kind in (*_KILLED, "gcs")
    },
    f"stopped for {STOPPED_S:.0f} s in the update: actor": Case("goes on", stopped("actor", STOPPED_S, updating)),
    f"stopped for {LONG_S:.0f} s: raylet": Case("ends", stopped("raylet", LONG_S)),
    f"stopped for {LONG_S:.0f} s: gcs": Case("goes on", stopped("gcs", LONG_S)),
    # When the driver is killed at the end, some or all of Ray's workers stay. The cause, the clock's step or libfaketime, is
    # unknown.
    "clock steps an hour ahead": Case("goes on", clock_steps("+3600"), around=clock, leaves=True, alone=True),
    "clock steps an hour back": Case("goes on", clock_steps("-3600"), around=clock, leaves=True, alone=True),
    "Ctrl-C: driver": Case("ends", signalled("driver", signal.SIGINT, generating)),
    "SIGTERM: driver": Case("ends", signalled("driver", signal.SIGTERM, generating)),
    "no file may grow: actor": Case("ends", no_more_files("actor", generating), says="File too large"),
    "full disk of checkpoints": Case(
        "ends",
        disk_is_full("checkpoints"),
        repair=disk_has_room,
        around=own_disk("checkpoints"),
        alone=True,
        says="No space left",
    ),
    "full disk of dumps": Case(
        "goes on", disk_is_full("dump"), around=own_disk("dump"), alone=True, metric="oar/dump_failed"
    ),
    "full disk of metrics": Case(
        "ends", disk_is_full("metrics"), around=own_disk_of_metrics, alone=True, says="No space left"
    ),
    "dumps' folder is gone": Case("goes on", dumps_have_no_room, alone=True, metric="oar/dump_failed"),
    "no file may grow: trainer": Case("ends", no_more_files("trainer", generating)),
    "out of memory: importance pass": Case(
        "goes on", overrides=_own("OutOfMemory"), alone=True, same=False, metric="oar/fallback/out_of_memory"
    ),
    "no more memory: actor": Case("ends", no_more_memory("actor", updating)),
    "importance of NaN": Case(
        "goes on", overrides=_own("NotFinite"), alone=True, same=False, metric="oar/fallback/non_finite"
    ),
    "NaN in all weights": Case("goes on", overrides=("actor_rollout_ref.actor.optim.lr=1e30",), alone=True, same=False),
    "importance raises": Case("ends", overrides=_own("Raises"), alone=True, says="that fails"),
    "reward raises": Case(
        "goes on",
        overrides=_rewards("raises"),
        alone=True,
        same=False,
        metric="oar/lost_responses",
        says="a reward that fails",
    ),
    "reward hangs": Case("waits for ever", overrides=_rewards("hangs"), alone=True),
    "reward of None": Case("ends", overrides=_rewards("nothing"), alone=True),
    "reward of text": Case(
        "goes on", overrides=_rewards("a_string"), alone=True, same=False, metric="oar/lost_responses"
    ),
    "reward of NaN": Case("goes on", overrides=_rewards("not_a_number"), alone=True, same=False),
    "reward of infinity": Case("goes on", overrides=_rewards("infinite"), alone=True, same=False),
    "half of the newest checkpoint": Case("ends", newest_checkpoint_is_half_written, repair=the_one_before_is_named),
    "half a checkpoint behind the newest": Case("ends", half_a_checkpoint_lies_there),
}
