"""Faults of users in whole runs: all but an importance that raises are counted, and the run goes on."""

import os
import shutil

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from recipes.smoke import SmokeFailed
from tests.faults import users
from tests.hosts.whole_run import smoke, whole_run
from tests.tracked import ROOT

pytestmark = [*whole_run, pytest.mark.nightly]
LOST = "oar/lost_responses"


@pytest.fixture
def run(assets, tmp_path, monkeypatch):
    """Runs two steps of a recipe with overrides; its workers find the faulty functions."""
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return lambda *overrides: smoke("qwen2_5_7b_math", tmp_path, *overrides)


def importance(kind):
    return (f"algorithm.oar.importance=python:{users.__name__}:{kind.__name__}",)


def reward(name):
    key = "reward.custom_reward_function"
    return (f"{key}.path=pkg://{users.__name__}", f"{key}.name={name}")


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (importance(users.OutOfMemory), "oar/fallback/out_of_memory"),
        (("actor_rollout_ref.actor.optim.lr=1e30",), None),  # NaN in all weights
        (reward("raises"), LOST),
        (reward("a_string"), LOST),
        (reward("not_a_number"), "oar/fallback/bad_reward"),
    ],
)
def test_a_run_goes_on_and_counts_the_fault(run, overrides, metric):
    steps = run(*overrides)
    assert [step["step"] for step in steps] == [1, 2]
    assert metric is None or any(step[metric] > 0 for step in steps)


def test_an_importance_that_raises_ends_the_run(run, tmp_path):
    with pytest.raises(SmokeFailed):
        run(*importance(users.Raises))
    assert "this configuration cannot work" not in (log := (tmp_path / "verl.log").read_text())
    assert "an importance of a user's own that fails" in log
