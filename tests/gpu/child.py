"""A process of a check, with a limit on its time; whatever it started is ended with it."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from verl_cpu.session import TIMED_OUT, session

ROOT = Path(__file__).parents[2]
TAIL = 60
"""Lines of its output that a failure shows."""


def run(command: list[str], log: Path, limit_s: float, **environment: str) -> None:
    """Run Python with these arguments, from the checkout; the check fails with the end of its output."""
    with session() as opened, log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, *command],
            # TF32 would be taken for float32 where an image of NVIDIA's allows it.
            env={**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "SPT_NOENV": "1", **environment, **opened.environment()},
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


def torchrun(processes: int, arguments: list[str], log: Path, limit_s: float) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    # The last one is what verl gives its workers, and sequence parallelism asks for.
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run([*start, *arguments], log, limit_s, **threads)


def suite(arguments: list[str], log: Path, limit_s: float, **environment: str) -> dict[str, int]:
    """Tests of the ordinary suite on this machine: how many there were, and how many were skipped."""
    found = log.with_suffix(".xml")
    # Without tests/conftest.py, whose packages are not those of a training environment.
    options = ["--noconftest", "-p", "no:cacheprovider", "-p", "no:timeout", f"--junitxml={found}"]
    run(["-m", "pytest", *options, *arguments], log, limit_s, **environment)
    (counted,) = ET.parse(found).getroot().iter("testsuite")
    return {name: int(counted.attrib[name]) for name in ("tests", "skipped")}
