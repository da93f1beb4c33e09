"""The faults of `cases.py` on whole runs. A run that ends is started again by the same command, and gets the next fault.

`python -m pytest tests/faults -m nightly` takes an hour or two on two cores. With OAR_FAULTS_SEEN=FILE each fault adds a line
to that file, for the tables of docs/evidence/faults.md (`table.py`).
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from tests.faults.cases import CASES, Case, Outcome
from tests.faults.run import LIMIT_S, LiveRun
from tests.faults.seeded import seeded

NUMBERS = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy", "oar/scored", "oar/ess_ratio")
"""Metrics that are compared between runs, bit for bit."""

STEPS = 200
"""The steps of a run without an end. A fault takes three or four of them."""
SIZES = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "algorithm.oar.dump.every=1",
)
GOES_ON_FOR = 2
"""Steps after a fault."""
FEWEST = 4
"""Steps of a run that has the fault from the start."""
PATIENCE_S = 240.0
"""A run that neither ends nor finishes a step for so long waits for ever."""
SHARED_MEMORY = Path("/dev/shm")
SEMAPHORES = "sem.mp-"
"""Python's semaphores, 32 bytes each. An undisturbed run leaves them too: Ray ends a worker's children with it, and so the
process that would remove them."""
CLOCKS = "faketime_"
"""Files of the clocks that step, which are removed after their run."""


def shared_memory() -> set[str]:
    names = {path.name for path in SHARED_MEMORY.glob("*")}
    return {name for name in names if not name.startswith(SEMAPHORES) and CLOCKS not in name}


def numbers(run: LiveRun) -> dict[int, list[Any]]:
    return {step["step"]: [step.get(name) for name in NUMBERS] for step in run.steps()}


class Chain:
    """Runs in one folder; each continues where the one before ended."""

    def __init__(self, folder: Path, assets: Path) -> None:
        self.folder, self.assets = folder, assets
        folder.mkdir(parents=True, exist_ok=True)
        self.run: LiveRun | None = None
        self._began, self._stack, self._shared_memory = 0, ExitStack(), shared_memory()

    def start(self, overrides: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> LiveRun:
        self._began += 1
        run = LiveRun(
            self.folder,
            self.assets,
            (*SIZES, *seeded(self.folder), *overrides),
            name=f"run{self._began}",
            environment=environment or {},
            limit_s=6 * LIMIT_S,
        )
        self.run = self._stack.enter_context(run)
        return run

    def live(self) -> LiveRun:
        """A run that has finished a step. Raises AssertionError where it ends before that."""
        run = self.run or self.start()
        run.wait_for(run.steps)
        return run

    def end(self) -> list[str]:
        """End the run; return the files that it leaves in shared memory."""
        self._stack.close()
        self.run = None
        return sorted(shared_memory() - self._shared_memory)


class Chains:
    """The current chain goes from fault to fault, until a run deviates."""

    def __init__(self, folder: Path, assets: Path) -> None:
        self._folder, self._assets, self._number = folder, assets, 0
        self.current = Chain(folder / "0", assets)

    def anew(self) -> None:
        self.current.end()
        self._number += 1
        self.current = Chain(self._folder / str(self._number), self._assets)


RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes that Ray leaves for more than a minute when the driver of a cluster is killed."""
BUFFER = "verl_weights_"
"""verl's buffer for weights on their way to the engine, where GPUs cannot share memory. It stays where the sender is killed."""


@dataclass
class Tried:
    """The outcome of a run with a fault."""

    outcome: Outcome
    left: list[str] = field(default_factory=list)  # processes that outlived the driver
    shared_memory: list[str] = field(default_factory=list)  # files that are left there
    again: str = ""  # why the new start failed or did not continue from the last checkpoint
    steps: dict[int, list[Any]] = field(default_factory=dict)  # the compared numbers of each step, of both runs
    metrics: dict[str, float] = field(default_factory=dict)  # the highest value of each of OAR's counters above 0
    error: str = ""  # the last line of the log with an error
    log: str = ""


@pytest.fixture(scope="module")
def undisturbed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The numbers of a run without a fault."""
    alone = Chain(tmp_path_factory.mktemp("undisturbed"), assets)
    try:
        run = alone.start()
        run.wait_to_end()
        assert run.status() == 0, run.log()[-4000:]
        by_step = numbers(run)
        assert all(any(column) for column in zip(*by_step.values(), strict=True)), "each metric is there"
        return by_step
    finally:
        alone.end()


@pytest.fixture(scope="module")
def chains(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chains]:
    started = Chains(tmp_path_factory.mktemp("chain"), assets)
    yield started
    started.current.end()


def outcome_of(run: LiveRun, steps: int) -> Outcome:
    """Wait until the run has so many steps, has ended, or has done nothing for `PATIENCE_S`."""
    seen, changed = len(run.steps()), time.monotonic()
    while not run.ended():
        if len(run.steps()) > seen:
            seen, changed = len(run.steps()), time.monotonic()
        if seen >= steps:
            return "goes on"
        if time.monotonic() - changed > PATIENCE_S:
            return "waits for ever"
        time.sleep(0.2)
    return "ends"


def counted(run: LiveRun) -> dict[str, float]:
    counters: dict[str, float] = {}
    for step in run.steps():
        for name, value in step.items():
            if name.startswith("oar/") and any(word in name for word in ("fallback", "failed", "lost")) and value > 0:
                counters[name] = max(value, counters.get(name, 0.0))
    return counters


def tried(case: Case, chain: Chain) -> Tried:
    with case.around(chain.folder) as environment:
        run = chain.start(case.overrides, environment) if case.alone else chain.live()
        case.fault(run)
        seen = Tried(outcome_of(run, max(FEWEST if case.alone else 0, len(run.steps()) + GOES_ON_FOR)))
        if seen.outcome != "goes on" or case.alone:
            seen.shared_memory, seen.left = chain.end(), run.left
        seen.steps, seen.log, seen.metrics = numbers(run), run.log(), counted(run)
        if seen.outcome != "goes on":
            case.repair(run)
            expected = run.checkpointed() + 1
            try:
                again = numbers(chain.live())
            except (AssertionError, TimeoutError) as error:
                again, seen.again = {}, str(error)
            if again and min(again) != expected:
                seen.again = f"it began with step {min(again)}, and {expected} follows on the last checkpoint"
            seen.steps |= again
            if case.alone:
                chain.end()
    errors = [line for line in seen.log.splitlines() if "Error" in line and "Warning" not in line]
    seen.error = errors[-1][-300:] if errors and seen.outcome == "ends" else ""
    return seen


def deviations(case: Case, seen: Tried, same: bool) -> list[str]:
    """The differences between the expected and the real outcome."""
    differences = []
    if seen.outcome != case.expected:
        differences.append(f"{seen.outcome}, expected: {case.expected} ({seen.log[-2000:]})")
    if seen.again:
        differences.append(f"could not be started again: {seen.again}")
    if case.same is not None and case.same != same:
        differences.append(f"{'the same' if same else 'other'} numbers as without the fault")
    if case.metric and not seen.metrics.get(case.metric, 0.0) > 0:
        differences.append(f"{case.metric} counts nothing")
    if case.says and case.says not in seen.log:
        differences.append(f"the log does not say {case.says!r}")
    if not case.leaves and not {*seen.left} <= {*RAYS_AGENTS}:
        differences.append(f"left: {', '.join(seen.left)}")
    if not all(name.startswith(BUFFER) for name in seen.shared_memory):
        differences.append(f"left in shared memory: {', '.join(seen.shared_memory)}")
    return differences


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(6 * LIMIT_S)
@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: CASES[name].alone))
def test_a_fault_does_what_is_expected_of_it(name, assets, undisturbed, chains, tmp_path):
    case, chain, differences = CASES[name], chains.current, ["no end"]
    if case.alone:
        chains.current.end()  # beside it nothing runs
        chain = Chain(tmp_path / "run", assets)
    try:
        seen = tried(case, chain)
        same = all(undisturbed[step] == here for step, here in seen.steps.items())
        differences = deviations(case, seen, same)
    finally:
        if case.alone:
            chain.end()
        elif differences:
            chains.anew()
    if file := os.environ.get("OAR_FAULTS_SEEN"):
        told = {key: value for key, value in asdict(seen).items() if key not in ("steps", "log")}
        line = {"name": name, **told, "steps": sorted(seen.steps), "same": same, "deviations": differences}
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
    assert differences == []
