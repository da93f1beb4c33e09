"""Starts the processes of a launch and waits for its result, with torchrun on this machine or with Ray on a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.offload.engine import terminable
from benchmarks.scaling.arguments import to_argv
from benchmarks.scaling.measure import FAILED, Failed, Launch, Measured, ModelShape, Settings, read

WORKER = "benchmarks.scaling.worker"

_GRACE_S = 10.0
_TAIL = 300

Starter = Callable[[int, list[str], float], None]
"""Run the worker in so many processes with these arguments, for at most so many seconds; RuntimeError says why it failed."""


def run_launch(launch: Launch, settings: Settings, runs: Path, timeout_s: float, start: Starter) -> Measured | Failed:
    """Measure one launch. Whatever goes wrong in it becomes a `Failed`, so that others can go on.

    Args:
        launch: the layout and its batch.
        settings: what all launches share.
        runs: folder of the result files.
        timeout_s: when to give up and end its processes.
        start: `torchrun` or `on_ray`.
    """
    problem = launch.layout.problem(_shape(settings), settings, launch.responses)
    if problem is not None:
        return Failed(launch, problem)
    result = runs / f"{launch.name}.json"
    result.unlink(missing_ok=True)
    try:
        start(launch.layout.processes, worker_arguments(launch, settings, runs), timeout_s)
    except RuntimeError as error:
        return Failed(launch, str(error))
    return find_result(launch, settings, runs)


def find_result(launch: Launch, settings: Settings, runs: Path) -> Measured | Failed:
    """What a launch left in `runs`, here or on a cluster."""
    path = runs / f"{launch.name}.json"
    if not path.exists():
        return Failed(launch, f"no result: {path.name} is not there")
    try:
        measured_with, measured = read(path)
    except ValueError as error:
        return Failed(launch, str(error))
    # `responses` of the settings may be of a rank or of all; the launch knows the batch.
    different = [
        name
        for name, value in vars(measured_with).items()
        if name not in ("responses", "rounds") and value != getattr(settings, name)
    ]
    if different:
        return Failed(launch, f"{path.name} was measured with other arguments: {', '.join(different)}")
    return measured


def worker_arguments(launch: Launch, settings: Settings, runs: Path) -> list[str]:
    """For `python -m` of the worker."""
    argv = to_argv(settings)
    if "--responses" in argv:
        at = argv.index("--responses")
        del argv[at : at + 2]
    total = ["--mode", "strong", "--responses", str(launch.responses)]
    return ["--layout", str(launch.layout), *total, "--runs", str(runs.resolve()), *argv]


def torchrun(processes: int, arguments: list[str], timeout_s: float) -> None:
    """On this machine.

    Raises:
        RuntimeError: it failed or took too long.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with terminable(), tempfile.TemporaryFile("w+", errors="replace") as log:
        started = subprocess.Popen(
            [*command, "-m", WORKER, *arguments],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of its processes can be ended
        )
        try:
            status = started.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {timeout_s:g} s (--timeout)") from None
        finally:
            _end(started)
        if status:
            log.seek(0)
            raise RuntimeError(reason_in(log.read(), status))


def _end(started: subprocess.Popen[Any]) -> None:
    """End a session of processes in order, and by force what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if started.poll() is not None and number == signal.SIGTERM:
            continue
        with suppress(ProcessLookupError):
            os.killpg(started.pid, number)
        with suppress(subprocess.TimeoutExpired):
            started.wait(_GRACE_S)


def reason_in(log: str, status: int) -> str:
    """Why a launch failed, in a line, from what its processes printed."""
    found = [line.split(FAILED, 1)[1].strip() for line in log.splitlines() if FAILED in line]
    if found:
        return found[0]
    return f"exit status {status}: ...{' '.join(log.split())[-_TAIL:]}"


def on_ray(processes: int, arguments: list[str], timeout_s: float) -> None:
    """One actor a GPU (without GPUs: a CPU) of the Ray cluster that `RAY_ADDRESS` names; of one on this machine without it.

    Raises:
        RuntimeError: it failed, took too long, or the cluster has too few.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    resource = "GPU" if ray.cluster_resources().get("GPU", 0) else "CPU"
    have = int(ray.cluster_resources().get(resource, 0))
    if have < processes:
        raise RuntimeError(f"the Ray cluster has {have} {resource}s, and the layout takes {processes}")
    group = placement_group([{resource: 1}] * processes, strategy="PACK")
    worker = ray.remote(**{f"num_{resource.lower()}s": 1})(RayWorker)
    workers: list[Any] = []
    try:
        ray.get(group.ready(), timeout=timeout_s)
        for index in range(processes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            workers.append(worker.options(scheduling_strategy=place).remote())
        address, port = ray.get(workers[0].free_address.remote(), timeout=timeout_s)
        done = [w.run.remote(arguments, rank, processes, address, port) for rank, w in enumerate(workers)]
        # The first that fails is the reason: the others then wait for it in vain.
        while done:
            ready, done = ray.wait(done, timeout=timeout_s)
            if not ready:
                raise RuntimeError(f"not done after {timeout_s:g} s (--timeout)")
            ray.get(ready)
    except ray.exceptions.GetTimeoutError:
        raise RuntimeError(f"not placed or started after {timeout_s:g} s (--timeout)") from None
    except ray.exceptions.RayError as error:
        raise RuntimeError(str(error).strip().splitlines()[-1]) from error
    finally:
        for each in workers:
            ray.kill(each)
        remove_placement_group(group)


class RayWorker:
    """One process of a launch, as an actor."""

    def free_address(self) -> tuple[str, int]:
        """Where rank 0 can be met."""
        import socket

        import ray

        with socket.socket() as listening:
            listening.bind(("", 0))
            return ray.util.get_node_ip_address(), listening.getsockname()[1]

    def run(self, arguments: Sequence[str], rank: int, processes: int, address: str, port: int) -> None:
        """The worker's `run`, with torchrun's variables. Ray shows an actor one GPU: its local rank is 0."""
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_RANK="0", MASTER_ADDR=address, MASTER_PORT=str(port)
        )
        from benchmarks.scaling.worker import run

        run(arguments)


def _shape(settings: Settings) -> ModelShape:
    return ModelShape.of(settings.size, Path(settings.model) if settings.model else None)
