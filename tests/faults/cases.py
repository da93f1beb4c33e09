"""Faults of whole runs whose path crosses the plugin's code, and the expected outcomes.

Most are in the run from its start, by its overrides. One waits until responses are generated, right after a step's metrics.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.faults.run import LiveRun

Outcome = Literal["ends", "goes on"]
Fault = Callable[[LiveRun], None]


@dataclass(frozen=True)
class Case:
    """A fault. `ends` is an end with an error, and a new start continues from the last checkpoint."""

    expected: Outcome
    fault: Fault = lambda run: None  # acts on the running run; without one the run itself has the fault
    overrides: tuple[str, ...] = ()  # of the run with the fault only
    same: bool = True  # all steps, also after a new start, have the numbers of an undisturbed run
    metric: str = ""  # it is above 0 in some step
    says: str = ""  # a part of the log


def dumps_have_no_folder(run: LiveRun) -> None:
    """Replace the folder of the dumps by a file, while responses are generated."""
    run.wait_for(run.steps)
    done = len(run.steps())
    run.wait_for(lambda: len(run.steps()) > done)
    folder = run.folder / "dump"
    shutil.rmtree(folder)
    folder.touch()


def _reward(name: str) -> tuple[str, ...]:
    prefix = "reward.custom_reward_function"
    return (f"{prefix}.path=pkg://tests.faults.rewards", f"{prefix}.name={name}")


def _own(name: str) -> tuple[str, ...]:
    return (f"algorithm.oar.importance=python:tests.faults.importances:{name}",)


LOST = "oar/lost_responses"
CASES: dict[str, Case] = {
    "dumps' folder is gone": Case("goes on", dumps_have_no_folder, metric="oar/dump_failed"),
    "out of memory: importance pass": Case(
        "goes on", overrides=_own("OutOfMemory"), same=False, metric="oar/fallback/out_of_memory"
    ),
    "importance of NaN": Case("goes on", overrides=_own("NotFinite"), same=False, metric="oar/fallback/non_finite"),
    "NaN in all weights": Case("goes on", overrides=("actor_rollout_ref.actor.optim.lr=1e30",), same=False),
    "importance raises": Case("ends", overrides=_own("Raises"), says="that fails"),
    "reward raises": Case("goes on", overrides=_reward("raises"), same=False, metric=LOST, says="a reward that fails"),
    "reward of text": Case("goes on", overrides=_reward("a_string"), same=False, metric=LOST),
    "reward of NaN": Case("goes on", overrides=_reward("not_a_number"), same=False),
    "reward of infinity": Case("goes on", overrides=_reward("infinite"), same=False),
}
