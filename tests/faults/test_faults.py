"""Faults on whole runs: each of `cases.py` is a run of four steps, and a second one where the first ended.

Two to three minutes a fault with two cores: `python -m pytest tests/faults -m nightly`, `-k` for some of them, `--lf` for those
that failed. With OAR_FAULTS_SEEN=FILE what was seen is added to that file, a line a fault, from which `python -m
tests.faults.table` makes the page of docs/.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from recipes.smoke import make_assets
from tests.faults.cases import CASES, NUMBERS, Case
from tests.faults.run import LIMIT_S, LiveRun
from tests.faults.seeded import seeded

PATIENCE_S = 240.0
"""A run without a new step for so long after a fault, and without an end, waits for ever."""
STEPS = 4
FOUR_STEPS = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1")
SHARED_MEMORY = Path("/dev/shm")
SEMAPHORES = "sem.mp-"
"""Python's, 32 bytes each. They stay behind a run that nothing happens to as well: Ray ends a worker's children with it, and
with them the process that would remove them."""


@dataclass
class Tried:
    """What became of a run with a fault.

    Attributes:
        outcome: as `Case.expected`.
        left: processes that outlived the driver.
        shared_memory: files that are left there, but for `SEMAPHORES`.
        again: exit status of the run that was started behind one that ended; None where there was none.
        steps: of each step of both runs, the numbers that are compared.
        metrics: the highest value of each of OAR's counters.
        error: the last line of the log that tells of one.
    """

    outcome: str
    left: list[str]
    shared_memory: list[str]
    again: int | None
    steps: dict[int, list[Any]]
    metrics: dict[str, float]
    error: str
    log: str


def numbers(run: LiveRun) -> dict[int, list[Any]]:
    return {step["step"]: [step.get(name) for name in NUMBERS] for step in run.steps()}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    make_assets(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(assets, tmp_path_factory):
    """The numbers of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with LiveRun(folder, assets, (*FOUR_STEPS, *seeded(folder))) as run:
        run.wait_to_end()
        assert run.status() == 0, run.log()[-4000:]
        return numbers(run)


def tried(case: Case, folder: Path, assets: Path) -> Tried:
    before = {*SHARED_MEMORY.glob("*")}
    overrides = (*FOUR_STEPS, *seeded(folder))
    with case.around(folder) as environment:
        with LiveRun(folder, assets, (*overrides, *case.overrides), environment=environment) as run:
            case.fault(run)
            seen, changed = len(run.steps()), time.monotonic()
            while not run.ended() and time.monotonic() - changed < PATIENCE_S:
                time.sleep(0.2)
                if len(run.steps()) > seen:
                    seen, changed = len(run.steps()), time.monotonic()
            waits = not run.ended()
        steps, found, again = run.steps(), numbers(run), None
        outcome = "waits for ever" if waits else "goes on" if run.status() == 0 else "ends"
        if outcome != "goes on":
            with LiveRun(folder, assets, overrides, name="second") as second:
                second.wait_to_end()
                again, found = second.status(), found | numbers(second)
    counters = {
        name for step in steps for name in step if name.startswith("oar/") and ("fallback" in name or "failed" in name)
    }
    errors = [line for line in run.log().splitlines() if "Error" in line and "Warning" not in line]
    return Tried(
        outcome,
        run.left,
        sorted(path.name for path in {*SHARED_MEMORY.glob("*")} - before if not path.name.startswith(SEMAPHORES)),
        again,
        found,
        {name: max(step.get(name, 0.0) for step in steps) for name in counters},
        errors[-1][-300:] if errors else "",
        run.log(),
    )


def deviations(case: Case, seen: Tried, undisturbed: dict[int, list[Any]]) -> list[str]:
    """What is not as expected."""
    found = []
    if seen.outcome != case.expected:
        found.append(f"{seen.outcome}, expected: {case.expected} ({seen.error})")
    if seen.again not in (None, 0):
        found.append(f"started again it ended with {seen.again}")
    if case.same and seen.steps != undisturbed:
        found.append(f"other numbers than without the fault: {seen.steps} {undisturbed}")
    if case.metric and not seen.metrics.get(case.metric, 0.0) > 0:
        found.append(f"{case.metric} counts nothing")
    if case.says and case.says not in seen.log:
        found.append(f"the log does not say {case.says!r}")
    if seen.left:
        found.append(f"left: {', '.join(seen.left)}")
    if seen.shared_memory:
        found.append(f"left in shared memory: {', '.join(seen.shared_memory)}")
    return found


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_does_what_is_expected_of_it(name, assets, undisturbed, tmp_path):
    seen = tried(CASES[name], tmp_path, assets)
    found = deviations(CASES[name], seen, undisturbed)
    if file := os.environ.get("OAR_FAULTS_SEEN"):
        told = {key: value for key, value in asdict(seen).items() if key not in ("steps", "log")}
        same = seen.steps == undisturbed
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"name": name, **told, "same": same, "deviations": found}) + "\n")
    assert found == []
