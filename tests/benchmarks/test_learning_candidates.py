"""Candidates live outside the package, but the benchmark must be able to run them."""

import importlib
import inspect
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.bench.learning_credit import CreditPass
from oar_plugin.bench.learning_rollout import roll_out
from oar_plugin.bench.reasoning.model import build_model
from oar_plugin.bench.reasoning.tasks import TASKS

gates = importlib.import_module("benchmarks.candidates.learning.gates")
importances = importlib.import_module("benchmarks.candidates.learning.importance")


def public(module):
    return sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    )


@pytest.mark.parametrize("name", public(gates))
@settings(deadline=None, max_examples=50)
@given(scores=st.lists(st.floats(0, 1e6), min_size=1, max_size=8), beta=st.floats(0, 5), tau=st.floats(0, 1))
def test_gates_keep_the_mass_and_the_order(name, scores, beta, tau):
    importance_BL = torch.tensor([[7.0, *scores, 9.0]], dtype=torch.float64)
    keep_BL = torch.tensor([[False, *[True] * len(scores), False]])
    weight_BL = getattr(gates, name)(importance_BL, keep_BL, tau, beta)
    assert (weight_BL[~keep_BL] == 1).all()
    weight, score = weight_BL[keep_BL], importance_BL[keep_BL]
    assert (weight > 0).all()
    assert weight.sum().item() == pytest.approx(len(scores), rel=1e-4)
    order = score.argsort()
    assert (weight[order].diff() >= -1e-4).all()


def test_gates_leave_a_response_without_reasoning_alone():
    for name in public(gates):
        weight_BL = getattr(gates, name)(torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool))
        assert (weight_BL == 1).all(), name


def test_one_large_score_does_not_silence_the_others():
    importance_BL = torch.tensor([[1e6, *[float(n) for n in range(1, 20)]]])
    keep_BL = torch.ones(1, 20, dtype=torch.bool)
    assert gates.ranked(importance_BL, keep_BL)[0, -1] > 1
    assert gates.winsorised(importance_BL, keep_BL)[0, -1] > 1
    assert gates.bounded(importance_BL, keep_BL).max() < gates.gate(importance_BL, keep_BL).max()


@pytest.fixture(scope="module")
def credit():
    """Random weights, so random text: candidates that need an answer score nothing there, but must run."""
    model = build_model(0, hidden=16, layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "oar_plugin.bench.learning_rollout._rewards", lambda readings: [float(n % 2) for n in range(len(readings))]
        )
        rollout = roll_out(model, TASKS["chain"], random.Random(0), torch.Generator().manual_seed(0), 2, 4)
    return CreditPass(model, rollout, "answer_mean", 0)


@pytest.mark.parametrize("name", public(importances))
def test_importances_run(credit, name):
    importance_BL = getattr(importances, name)(credit)
    assert importance_BL.shape == credit.rollout.token_BL.shape
    assert torch.isfinite(importance_BL).all()
    assert (importance_BL >= 0).all()
