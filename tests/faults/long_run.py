"""Two thousand steps with offloaded importance and dumps on: what grows?

    python -m tests.faults.long_run --out FOLDER

Real verl, Ray and vLLM with a tiny model on a CPU; an hour or two. `samples.jsonl` keeps what the processes held, every
quarter of a minute, and `long_run.json` how much each grew in the second half of the steps: a straight line through it.
"""

import argparse
import itertools
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import statsmodels.api as sm
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from recipes.smoke import make_assets
from tests.faults import watched
from tests.faults.run import KINDS, LiveRun

SAMPLE_EVERY_S = 15.0
SETTLES = 0.5
"""Of the steps, in which caches and pools fill. No line goes through them.

In 2,000 steps Ray's GCS, which keeps the last 100,000 tasks, grew from 40 to 410 MB in the first thousand and to 430 MB in the
second. It was a tenth before that was seen."""
GROWS = 0.02
"""Of what it is on average: where the interval of a growth over these steps lies above it, something is not given back."""
FEWEST = 10  # samples, for a line

SIZES = (
    "data.train_batch_size=4",
    "trainer.total_epochs=1000000",
    "algorithm.oar.perturbation.span=2",  # its responses are short
)


def held(run: LiveRun, inside: Path) -> dict[str, float]:
    """By kind of process: memory of its own (USS, MB), open files, threads, and what `watched` saw. Of all: files, memory."""
    found: dict[str, float] = {}
    for kind in KINDS:
        for process in run.of(kind):
            values = {}
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                values = {
                    "memory, MB": process.memory_full_info().uss / 1e6,
                    "open files": process.num_fds(),
                    "threads": process.num_threads(),
                    "CPU, s": times.user + times.system,
                }
            with suppress(OSError, ValueError):
                *_, line, _ = (inside / f"{process.pid}.jsonl").read_text(encoding="utf-8").split("\n")
                seen = json.loads(line)
                if time.time() - seen.pop("time") < 4 * watched.EVERY_S:  # it is still looking
                    values |= seen
            for name, value in values.items():
                found[f"{kind}: {name}"] = found.get(f"{kind}: {name}", 0) + value
    found["all: processes"] = run.processes()
    found["all: shared memory, MB"] = sum(sizes(Path("/dev/shm"))) / 1e6
    found["all: files in Ray's folder"] = len(sizes(run.directory))
    return found


def sizes(folder: Path) -> list[int]:
    """Of every file below it, in bytes."""
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                found.append(path.stat().st_size)
    return found


@dataclass
class Growth:
    """Of one thing, over the steps behind those in which the run settles.

    Attributes:
        mean: what it was.
        by: what the straight line through it rises, `low` to `high` with 95 % (Newey and West's errors: samples behind each
            other are alike).
    """

    name: str
    mean: float
    by: float
    low: float
    high: float

    @property
    def grows(self) -> bool:
        return self.low > GROWS * abs(self.mean)


def growth(name: str, steps: Sequence[float], values: Sequence[float]) -> Growth:
    at, of = np.asarray(steps, float), np.asarray(values, float)
    span = at.max() - at.min()
    line = sm.OLS(of, sm.add_constant((at - at.min()) / span)).fit(
        cov_type="HAC", cov_kwds={"maxlags": max(1, len(of) // 10)}
    )
    low, high = line.conf_int()[1]
    return Growth(name, float(of.mean()), float(line.params[1]), float(low), float(high))


def growths(samples: list[dict[str, float]], steps: list[dict[str, float]]) -> list[Growth]:
    """Of everything that was sampled, of the seconds of a step, and of the CPU's seconds of a step."""
    begin = SETTLES * max(step["step"] for step in steps)
    later = [sample for sample in samples if sample["step"] > begin]
    found = []
    for name in sorted({name for sample in later for name in sample} - {"step"}):
        here = [sample for sample in later if name in sample]
        if name.endswith("CPU, s"):
            pairs = [
                (after["step"], (after[name] - before[name]) / (after["step"] - before["step"]))
                for before, after in itertools.pairwise(here)
                if after["step"] > before["step"]
            ]
        else:
            pairs = [(sample["step"], sample[name]) for sample in here]
        if len(pairs) >= FEWEST:
            found.append(growth(f"{name} a step" if name.endswith("CPU, s") else name, *zip(*pairs, strict=True)))
    after = [step for step in steps if step["step"] > begin]
    seconds = [step["timing_s/step"] for step in after]
    return [*found, growth("seconds a step", [step["step"] for step in after], seconds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its run ends with it
    folder, inside = told.out.resolve(), told.out.resolve() / "inside"
    inside.mkdir(parents=True)  # of one run alone
    make_assets(folder)
    run = LiveRun(
        folder,
        folder,
        (*SIZES, f"trainer.total_training_steps={told.steps}", f"trainer.save_freq={told.steps // 4}"),
        recipe="qwen2_5_7b_oar_p",
        environment={watched.FOLDER: str(inside), "VERL_USE_EXTERNAL_MODULES": watched.__name__},
        limit_s=20.0 * told.steps,
    )
    samples = []
    with run, Progress() as progress, (folder / "samples.jsonl").open("w", encoding="utf-8") as lines:
        task = progress.add_task("steps", total=told.steps)
        while not run.ended():
            time.sleep(SAMPLE_EVERY_S)
            done = len(run.steps())
            progress.update(task, completed=done)
            if done:
                samples.append({"step": done, **held(run, inside)})
                lines.write(json.dumps(samples[-1]) + "\n")
                lines.flush()
    found = growths(samples[:-1], run.steps())  # the last one may have seen the run's end
    report = {
        "steps": len(run.steps()),
        "steps with a scored response": sum(step.get("oar/scored", 0) > 0 for step in run.steps()),
        "copies": sum(step.get("oar/offload/copies", 0) for step in run.steps()),
        "growths": [asdict(one) for one in found],
    }
    (folder / "long_run.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    table = Table("", "mean", "growth", "95 %", title=f"{len(run.steps())} steps")
    for one in found:
        style = "bold red" if one.grows else None
        table.add_row(one.name, f"{one.mean:.4g}", f"{one.by:+.3g}", f"{one.low:+.3g} to {one.high:+.3g}", style=style)
    Console().print(table)
    if run.status() != 0 or run.left:
        print(f"ended with {run.status()}, left: {run.left}\n{run.log()[-4000:]}", file=sys.stderr)
    return int(run.status() != 0 or bool(run.left) or any(one.grows for one in found))


if __name__ == "__main__":
    sys.exit(main())
