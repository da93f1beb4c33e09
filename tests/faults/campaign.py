"""Try the faults of `cases.py` on real runs: `python -m tests.faults.campaign [--only NAME...]`.

Each fault is a run of four steps, and a second one where the first ended: about three minutes with two cores. What was tried is
kept in `--results`, a file each, and not tried again.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.smoke import make_assets
from tests.faults.cases import CASES, NUMBERS, Case
from tests.faults.run import LiveRun

PATIENCE_S = 240.0
"""A run without a new step for so long after a fault, and without an end, waits for ever."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Tried:
    """What became of a run with a fault.

    Attributes:
        outcome: as `Case.expected`.
        seconds: from the fault to the end of the run, or to its next step.
        left: processes that outlived the driver.
        shared_memory: files that are left there.
        again: exit status of the run that was started behind one that ended; None where there was none.
        steps: of each step of both runs, the numbers that are compared.
        metrics: the highest value of each of OAR's counters.
        error: the last line of the log that tells of one.
    """

    outcome: str
    seconds: float
    left: list[str]
    shared_memory: list[str]
    again: int | None
    steps: dict[int, list[Any]]
    metrics: dict[str, float]
    error: str
    log: str = ""


def assets_in(folder: Path) -> Path:
    if not (folder / "data.parquet").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_assets(folder)
    return folder


def numbers(steps: list[dict[str, Any]]) -> dict[int, list[Any]]:
    return {step["step"]: [step.get(name) for name in NUMBERS] for step in steps}


def undisturbed(folder: Path, assets: Path, **settings: Any) -> dict[int, list[Any]]:
    """The numbers of a run that nothing happens to. Raises AssertionError where it fails."""
    with LiveRun(folder, assets, **settings) as run:
        run.wait_to_end()
        assert run.status() == 0, run.log()[-4000:]
        return numbers(run.steps())


def tried(case: Case, folder: Path, assets: Path) -> Tried:
    before = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    with LiveRun(folder, assets, case.overrides) as run:
        case.fault(run)
        begun = time.monotonic()
        seen, changed = len(run.steps()), begun
        while not run.ended() and time.monotonic() - changed < PATIENCE_S:
            time.sleep(0.2)
            if len(run.steps()) > seen:
                seen, changed = len(run.steps()), time.monotonic()
        waits, seconds = not run.ended(), time.monotonic() - begun
    steps, found, again = run.steps(), numbers(run.steps()), None
    outcome = "waits for ever" if waits else "goes on" if run.status() == 0 else "ends"
    if outcome != "goes on":
        with LiveRun(folder, assets, name="second") as second:
            second.wait_to_end()
            again = second.status()
            found |= numbers(second.steps())
    counted = {
        name for step in steps for name in step if name.startswith("oar/") and ("fallback" in name or "failed" in name)
    }
    errors = [line for line in run.log().splitlines() if "Error" in line and "Warning" not in line]
    return Tried(
        outcome,
        round(seconds, 1),
        run.left,
        sorted(path.name for path in set(SHARED_MEMORY.iterdir()) - before) if SHARED_MEMORY.is_dir() else [],
        again,
        found,
        {name: max(step.get(name, 0.0) for step in steps) for name in counted},
        errors[-1][-300:] if errors else "",
        run.log()[-20_000:],
    )


def faults_of(case: Case, seen: Tried, expected_steps: dict[int, list[Any]]) -> list[str]:
    """What is not as expected."""
    found = []
    if seen.outcome != case.expected:
        found.append(f"{seen.outcome}, expected: {case.expected} ({seen.error})")
    if seen.again not in (None, 0):
        found.append(f"started again it ended with {seen.again}")
    if case.same and seen.steps != expected_steps:
        found.append("other numbers than without the fault")
    if case.metric and not seen.metrics.get(case.metric, 0.0) > 0:
        found.append(f"{case.metric} counts nothing")
    if case.says and case.says not in seen.log:
        found.append(f"the log does not say {case.says!r}")
    if seen.left:
        found.append(f"left: {', '.join(seen.left)}")
    if seen.shared_memory:
        found.append(f"left in shared memory: {', '.join(seen.shared_memory)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--results", type=Path, default=Path("faults"), help="folder of what was tried")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders beside it")
    settings = parser.parse_args()
    results: Path = settings.results.resolve()
    assets = assets_in(results / "assets")
    reference = results / "undisturbed.json"
    if not reference.exists():
        reference.write_text(json.dumps(undisturbed(results / "undisturbed", assets)), encoding="utf-8")
    expected = {int(step): row for step, row in json.loads(reference.read_text(encoding="utf-8")).items()}
    for name in settings.only:
        file = results / f"{name.replace(' ', '_')}.json"
        if file.exists():
            continue
        folder = Path(tempfile.mkdtemp(prefix="fault_", dir=results))
        seen = tried(CASES[name], folder, assets)
        file.write_text(json.dumps(asdict(seen)), encoding="utf-8")
        print(
            f"{name}: {seen.outcome} after {seen.seconds:.0f} s",
            *faults_of(CASES[name], seen, expected),
            sep="\n    ",
            flush=True,
        )
        if not settings.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
