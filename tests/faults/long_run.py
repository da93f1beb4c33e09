"""Two thousand steps with offloaded importance and dumps: which numbers grow? `python -m tests.faults.long_run --out FOLDER`

Real verl, Ray and vLLM with a tiny model on a CPU, in an hour or two. `samples.jsonl` has the resources of the processes,
sampled every `SAMPLE_EVERY_S`; `long_run.json` has the growth of each in the second half of the steps, by a straight line.
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

from recipes.smoke import make_assets
from tests.faults import watched
from tests.faults.run import KINDS, LiveRun

SAMPLE_EVERY_S = 15.0
SETTLES = 0.5
"""The share of the steps that are left out, since caches and pools fill in them.

In 2,000 steps Ray's GCS, which keeps the last 100,000 tasks, grew from 40 to 410 MB in the first thousand and to 430 MB in the
second."""
GROWS = 0.02
"""A share of the mean. Where the whole interval of a growth lies above it, something is not released."""
FEWEST = 10  # samples of a line

SIZES = (
    "data.train_batch_size=4",
    "trainer.total_epochs=1000000",
    "algorithm.oar.perturbation.span=2",  # its responses are short
)


def held(run: LiveRun, inside: Path) -> dict[str, float]:
    """The resources of each kind of process: own memory (USS, MB), open files, threads, and the counts of `watched`; and the
    processes, shared memory and files of all of them together."""
    resources: dict[str, float] = {}
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
                if time.time() - seen.pop("time") < 4 * watched.EVERY_S:  # its thread still writes
                    values |= seen
            for name, value in values.items():
                resources[f"{kind}: {name}"] = resources.get(f"{kind}: {name}", 0) + value
    resources["all: processes"] = run.processes()
    resources["all: shared memory, MB"] = sum(sizes(Path("/dev/shm"))) / 1e6
    resources["all: files in Ray's folder"] = len(sizes(run.directory))
    return resources


def sizes(folder: Path) -> list[int]:
    """The size of every file below the folder, in bytes."""
    every = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                every.append(path.stat().st_size)
    return every


@dataclass
class Growth:
    """The growth of one resource over the steps after the run has settled, with Newey and West's errors, since
    consecutive samples are correlated."""

    name: str
    mean: float
    by: float  # the rise of the straight line through its samples
    low: float  # of the rise's 95 % interval
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
    """The growth of every sampled resource, of the seconds of a step, and of its CPU seconds."""
    begin = SETTLES * max(step["step"] for step in steps)
    later = [sample for sample in samples if sample["step"] > begin]
    every = []
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
            every.append(growth(f"{name} a step" if name.endswith("CPU, s") else name, *zip(*pairs, strict=True)))
    after = [step for step in steps if step["step"] > begin]
    seconds = [step["timing_s/step"] for step in after]
    return [*every, growth("seconds a step", [step["step"] for step in after], seconds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, which ends the run
    folder, inside = told.out.resolve(), told.out.resolve() / "inside"
    inside.mkdir(parents=True)  # fails where an earlier run has written
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
    with run, (folder / "samples.jsonl").open("w", encoding="utf-8") as lines:
        while not run.ended():
            time.sleep(SAMPLE_EVERY_S)
            if done := len(run.steps()):
                samples.append({"step": done, **held(run, inside)})
                lines.write(json.dumps(samples[-1]) + "\n")
                lines.flush()
    every = growths(samples[:-1], run.steps())  # the last sample may be of processes that end
    report = {
        "steps": len(run.steps()),
        "steps with a scored response": sum(step.get("oar/scored", 0) > 0 for step in run.steps()),
        "copies": sum(step.get("oar/offload/copies", 0) for step in run.steps()),
        "growths": [asdict(one) for one in every],
    }
    (folder / "long_run.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    for one in every:
        grows = "GROWS " if one.grows else ""
        print(f"{grows}{one.name}: {one.mean:.4g}, grows by {one.by:+.3g} (95 %: {one.low:+.3g} to {one.high:+.3g})")
    if run.status() != 0 or run.left:
        print(f"ended with {run.status()}, left: {run.left}\n{run.log()[-4000:]}", file=sys.stderr)
    return int(run.status() != 0 or bool(run.left) or any(one.grows for one in every))


if __name__ == "__main__":
    sys.exit(main())
