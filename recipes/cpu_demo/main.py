"""Train a small model with OAR through verl on this machine, and show what came of it.

Needs two cores, 6.5 GB of free memory and no GPU. Ctrl-C ends it and every process it started.
"""

import argparse
import importlib.util
import os
import secrets
import sys
from datetime import datetime
from pathlib import Path

import verl_cpu as cpu
from oar_plugin.cli.arguments import positive

NEEDED_GB = 6.5


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when it went through, 1 when something stopped it (one line says what), 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--compare", action="store_true", help="train a second time, with plain GRPO")
    parser.add_argument("--steps", type=positive, default=35, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of model, data and sampling")
    parser.add_argument("--out", type=Path, default="oar_demo", help="each start makes a folder of its own in here")
    settings = parser.parse_args(arguments)
    status = 1
    try:
        obstacle = find_obstacle() or run(settings.out, settings.compare, settings.steps, settings.seed)
    except KeyboardInterrupt:
        obstacle, status = "interrupted", 130
    if obstacle is None:
        return 0
    print(f"cpu_demo: {obstacle}", file=sys.stderr)
    return status


def find_obstacle() -> str | None:
    """What keeps the demo from running here, and what to do about it."""
    missing = [
        name for name in ("verl", "vllm", "psutil", "scipy", "matplotlib") if importlib.util.find_spec(name) is None
    ]
    if missing:
        return f"{', '.join(missing)} is not installed here: start it with `bash recipes/cpu_demo/run.sh`, which installs it"
    free = free_memory() / 1024**3
    if free < NEEDED_GB:
        return f"needs {NEEDED_GB:g} GB of free memory, there are {free:.1f}: close other programs and start again"
    if not cpu.wanted():
        return "this is the demo for machines without a GPU: here use your own verl command with algorithm.adv_estimator=oar"
    return None


def free_memory() -> int:
    """Bytes that new processes can have: of the machine, or of the container where that allows less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        cache = int((group / "memory.stat").read_text(encoding="utf-8").split("inactive_file ")[1].split()[0])
    except (OSError, ValueError, IndexError):  # no such limit ("max"), or no control groups of version 2
        return free
    return min(free, limit - used + cache)


def new_folder(parent: Path) -> Path:
    """A folder that no other start of the demo uses."""
    folder = parent.resolve() / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    return folder


def run(parent: Path, compare: bool, steps: int, seed: int) -> str | None:
    """Returns what stopped it; None when it went through."""
    try:
        folder = new_folder(parent)
    except OSError as error:
        return f"cannot write to {parent} ({error.strerror}): choose another place with --out"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from recipes.cpu_demo.demo import run_demo
    from recipes.cpu_demo.training import TrainingFailed

    try:
        run_demo(folder, ("oar", "grpo") if compare else ("oar",), steps, seed)
    except TrainingFailed as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
