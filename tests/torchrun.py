"""Processes of a test that torchrun starts, with a limit on their time; none of them outlives the test."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.limits import PROCESS_S
from verl_cpu.session import session

ROOT = Path(__file__).parents[1]


def torchrun(
    module: str, words: Iterable[object], processes: int = 2, limit: float = PROCESS_S, **variables: str
) -> None:
    """Run this module of the checkout with these words on its command line; the test fails with the end of its output."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # A limit of subprocess ends torchrun alone; the session ends what it started.
    with session() as opened:
        done = subprocess.run(
            [*start, "-m", module, *map(str, words)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | variables | opened.environment(),
            cwd=ROOT,
            timeout=limit,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
