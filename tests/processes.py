"""Processes that a test starts: each has a limit on its time, and none of them outlives the test.

`ranks` starts the ranks of a module and returns what every rank returned. The module ends with `if __name__ == "__main__":
worker(FUNCTION)`. On GPUs torchrun starts a process for each rank. On a CPU the ranks are forks of one process that has
imported the module: importing verl and Megatron takes ten seconds, and only a process that never used CUDA can be forked.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.limits import PROCESS_S
from verl_cpu.session import TIMED_OUT, session

ROOT = Path(__file__).parents[1]
RESULTS, FORKS = "OAR_TEST_RESULTS", "OAR_TEST_FORKS"
"""Environment variables: the folder of the ranks' results, and how many ranks `worker` forks."""
TAIL = 60
"""Lines of the output that a failure shows."""


def run(command: list[str], log: Path, limit_s: float, **variables: str) -> None:
    """Run Python with these arguments, from the checkout; the test fails with the end of the output, which `log` keeps."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # TF32 would be taken for float32 where an image of NVIDIA's allows it.
    environment = os.environ | {"PYTHONPATH": paths, "NVIDIA_TF32_OVERRIDE": "0", "SPT_NOENV": "1"} | variables
    with session() as opened, log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, *command],
            env=environment | opened.environment(),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
    child.wait()
    # What follows is torchrun's.
    own, _, _ = log.read_text(errors="replace").partition("torch/distributed/elastic/multiprocessing/api.py")
    tail = "\n".join(own.splitlines()[-TAIL:])
    how = f"took longer than {limit_s:.0f} s" if status == TIMED_OUT else f"ended with status {status}"
    if status != 0:
        pytest.fail(f"{' '.join(command)}\n{how}; its output, {log}, ends with:\n{tail}", pytrace=False)


def ranks(
    module: str,
    *words: object,
    processes: int = 2,
    limit_s: float = PROCESS_S,
    log: Path | None = None,
    **variables: str,
) -> list[Any]:
    """Return the results of all ranks of a module of the checkout; `words` are its command line."""
    # verl gives the last one to its workers, and sequence parallelism asks for it.
    variables = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}
    start = ["-m", module, *map(str, words)]
    if torch.cuda.is_available():
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *start]
    else:
        variables[FORKS] = str(processes)
    with tempfile.TemporaryDirectory() as folder:
        run(start, log or Path(folder, "log"), limit_s, **{RESULTS: folder}, **variables)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(processes)]


def worker(main: Callable[..., Any]) -> None:
    """Call `main` on this rank with the words of the command line, leave its result to the test, and end."""
    if FORKS in os.environ:
        _fork(int(os.environ.pop(FORKS)))
    result = main(*sys.argv[1:])
    torch.save(result, f"{os.environ[RESULTS]}/{os.environ['RANK']}.pt")
    if distributed.is_initialized():
        distributed.barrier()
    _end(0)


def _fork(size: int) -> None:
    """Return in `size` forks of this process, with torchrun's variables; end this process when they have ended."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=size)
    host, port = listening.getsockname()
    address = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for rank in range(size):
        if os.fork() == 0:
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            os.environ |= address | {name: str(value) for name, value in place.items()}
            return
    # Its thread looks up names for who connects: a fork in the middle of that would inherit the C library's lock.
    _store = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    for _ in range(size):
        _, status = os.wait()
        if status:  # the others may wait for it; the test ends them
            _end(1)
    _end(0)


def _end(status: int) -> None:
    """End at once: threads of gloo and FSDP outlive destroy_process_group on some builds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
