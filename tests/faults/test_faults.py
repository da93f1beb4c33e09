"""The faults of `cases.py` on whole runs. A run that ends is started again by the same command.

`python -m pytest tests/faults -m nightly` takes half an hour on two cores. With OAR_FAULTS_SEEN=FILE each fault adds a line to
that file, for the table of docs/evidence/faults.md (`table.py`).
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from tests.faults.cases import CASES, Outcome
from tests.faults.run import LIMIT_S, LiveRun
from tests.faults.seeded import seeded

NUMBERS = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy", "oar/scored", "oar/ess_ratio")
"""Metrics that are compared between runs, bit for bit."""
STEPS = 12
"""The steps of an undisturbed run. A fault takes three or four of them, and a new start one."""
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


def numbers(run: LiveRun) -> dict[int, list[Any]]:
    return {step["step"]: [step.get(name) for name in NUMBERS] for step in run.steps()}


def started(folder: Path, assets: Path, name: str, overrides: tuple[str, ...] = ()) -> LiveRun:
    return LiveRun(folder, assets, (*SIZES, *seeded(folder), *overrides), name)


@pytest.fixture(scope="module")
def undisturbed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The numbers of a run without a fault."""
    with started(tmp_path_factory.mktemp("undisturbed"), assets, "run") as run:
        assert run.status() == 0, run.log()[-4000:]
    by_step = numbers(run)
    assert all(any(column) for column in zip(*by_step.values(), strict=True)), "each metric is there"
    return by_step


def outcome_of(run: LiveRun, steps: int) -> Outcome:
    """Wait until the run has so many steps or has ended."""
    deadline = time.monotonic() + LIMIT_S
    while not run.ended():
        if len(run.steps()) >= steps:
            return "goes on"
        assert time.monotonic() < deadline, f"neither ends nor goes on:\n{run.log()[-4000:]}"
        time.sleep(0.2)
    return "ends"


def counted(run: LiveRun) -> dict[str, float]:
    """The highest value of each of OAR's counters of failures that is above 0."""
    counters: dict[str, float] = {}
    for step in run.steps():
        for name, value in step.items():
            if name.startswith("oar/") and any(word in name for word in ("fallback", "failed", "lost")) and value > 0:
                counters[name] = max(value, counters.get(name, 0.0))
    return counters


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_does_what_is_expected_of_it(name, assets, undisturbed, tmp_path):
    case = CASES[name]
    with started(tmp_path, assets, "first", case.overrides) as run:
        case.fault(run)
        outcome = outcome_of(run, max(FEWEST, len(run.steps()) + GOES_ON_FOR))
        status = run.status() if outcome == "ends" else None
    steps, log, metrics = numbers(run), run.log(), counted(run)
    assert outcome == case.expected, log[-4000:]
    if outcome == "ends":
        assert status != 0
        with started(tmp_path, assets, "again") as again:
            expected = again.checkpointed() + 1
            again.wait_for(again.steps)
            assert min(numbers(again)) == expected, "the step after the last checkpoint"
        steps |= numbers(again)
    same = all(undisturbed[step] == here for step, here in steps.items())
    assert same == case.same
    assert not case.metric or metrics.get(case.metric, 0.0) > 0, metrics
    assert case.says in log
    if file := os.environ.get("OAR_FAULTS_SEEN"):
        errors = [line for line in log.splitlines() if "Error" in line and "Warning" not in line]
        error = errors[-1][-300:] if errors and outcome == "ends" else ""
        line = {"name": name, "outcome": outcome, "metrics": metrics, "error": error, "steps": [*steps], "same": same}
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
