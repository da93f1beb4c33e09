"""Imports packages, each in a process of its own, for `oar doctor`: an import may crash or hang."""

import importlib
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from signal import Signals
from subprocess import DEVNULL, PIPE, TimeoutExpired, run

from oar_plugin.output import cause

LIMIT_S = 300.0  # seconds of one import, which takes ten, or minutes from a slow network disk


def import_faults(modules: Mapping[str, str]) -> dict[str, str | None]:
    """Return for each name why the import of its module fails; None if it works."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return dict(zip(modules, threads.map(_import_fault, modules.values()), strict=True))


def _import_fault(module: str) -> str | None:
    # With -m the working directory is on the search path, as for `python -m verl.trainer.main_ppo`.
    words = [sys.executable, "-m", __name__, module]
    try:
        done = run(words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, text=True, errors="replace", timeout=LIMIT_S)
    except TimeoutExpired:
        return f"no answer within {LIMIT_S:g} s"
    if done.returncode < 0:
        return f"crashed with {Signals(-done.returncode).name}"
    return (done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}") if done.returncode else None


if __name__ == "__main__":
    try:
        importlib.import_module(sys.argv[1])
    except (Exception, SystemExit) as error:
        sys.exit(f"\n{cause(error)}")
    os._exit(0)  # a normal exit runs the packages' exit code, which may hang
