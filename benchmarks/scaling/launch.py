"""Starts the processes of a launch on this machine, with torchrun, and waits for its result."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.scaling.layouts import Launch, Work
from oar_plugin.hosts.verl.cpu.session import session

WORKER = "benchmarks.scaling.worker"
FAILED = "benchmarks scaling failed:"
"""What a line of a worker that gives the reason begins with."""


def run_launch(launch: Launch, work: Work, runs: Path, timeout_s: float) -> dict[str, Any]:
    """The launch's result. Raises: RuntimeError, whatever went wrong, in a line."""
    problem = launch.problem(work)
    if problem is not None:
        raise RuntimeError(problem)
    launch.file(runs).unlink(missing_ok=True)  # must not be taken for what is measured now
    torchrun(launch.layout.processes, launch.argument(work, runs), timeout_s)
    return launch.result(work, runs)


def torchrun(processes: int, argument: str, timeout_s: float) -> None:
    """Run the worker in so many processes; however it ends, none of them is left.

    Raises:
        RuntimeError: it failed or took too long.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with session() as opened, tempfile.TemporaryFile("w+", errors="replace") as log:
        started = subprocess.Popen(
            [*command, "-m", WORKER, argument],
            cwd=Path(__file__).parents[2],  # where `benchmarks` is found
            env={"OMP_NUM_THREADS": "1", **os.environ, **opened.environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
        )
        try:
            status = started.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {timeout_s:g} s (--timeout)") from None
        if status:
            log.seek(0)
            raise RuntimeError(reason_in(log.read(), status))


def reason_in(log: str, status: int) -> str:
    """Why a launch failed, in a line, from what its processes printed."""
    found = [line.split(FAILED, 1)[1].strip() for line in log.splitlines() if FAILED in line]
    return found[0] if found else f"exit status {status}: ...{' '.join(log.split())[-300:]}"
