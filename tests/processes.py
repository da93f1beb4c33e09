"""Processes that a test starts: each has a limit on its time, and none of them outlives the test.

`ranks` starts a module by torchrun and returns what every rank returned. The module ends with `if __name__ == "__main__":
worker(FUNCTION)`.
"""

import os
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
RESULTS = "OAR_TEST_RESULTS"
"""The variable that names the folder of the ranks' results."""
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
    # The rest is torchrun's.
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
    """The results of all ranks of a module of the checkout, which torchrun starts with these words on its command line."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m", module]
    # verl gives the last one to its workers, and sequence parallelism asks for it.
    variables = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}
    with tempfile.TemporaryDirectory() as folder:
        run([*start, *map(str, words)], log or Path(folder, "log"), limit_s, **{RESULTS: folder}, **variables)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(processes)]


def worker(main: Callable[..., Any]) -> None:
    """Call `main` with the words of the command line, leave its result to the test, and end."""
    result = main(*sys.argv[1:])
    torch.save(result, f"{os.environ[RESULTS]}/{os.environ['RANK']}.pt")
    if distributed.is_initialized():
        distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo and FSDP outlive destroy_process_group on some builds
