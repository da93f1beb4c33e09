"""Candidates live outside the package, but the benchmark must be able to run them."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.learning.credit import method_of
from benchmarks.tiny.model import build_model
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import gate_of
from oar_plugin.passes.request import Request
from tests.bench.rollouts import demonstrated

FOLDER = "benchmarks.candidates.learning"
gates = importlib.import_module(f"{FOLDER}.gates")
importances = importlib.import_module(f"{FOLDER}.importance")


def public(module, kind=inspect.isfunction):
    return sorted(
        name
        for name, value in vars(module).items()
        if kind(value) and value.__module__ == module.__name__ and not name.startswith("_")
    )


@pytest.mark.parametrize("name", public(gates))
def test_gates_are_taken(name):
    assert gate_of(f"python:{FOLDER}.gates:{name}").weights is getattr(gates, name)


def test_the_table_of_edges_is_made():
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, "benchmarks/gate_edges.py"], cwd=root, capture_output=True, text=True, check=True
    )
    page = (root / "benchmarks/gate_edges.md").read_text()
    named = [
        [line.rsplit("|", 6)[0] for line in text.split("\n") if line.startswith("|")] for text in (made.stdout, page)
    ]
    assert named[0] == named[1]


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
    assert gates.bounded(importance_BL, keep_BL).max() < gates.bi_level(importance_BL, keep_BL).max()


@pytest.fixture(scope="module")
def setting():
    model = build_model(0, hidden=16, layers=1)
    return model, demonstrated(model)


@pytest.mark.parametrize("name", public(importances, inspect.isclass))
def test_importances_score(setting, name):
    model, rollout = setting
    path = f"python:{FOLDER}.importance:{name}"
    importance_BL = method_of(path)(model, rollout, Request(path))
    kept = importance_BL[rollout.reasoning_BL]
    assert importance_BL.shape == rollout.token_BL.shape
    assert torch.isfinite(importance_BL).all()
    assert (importance_BL >= 0).all()
    assert kept.std() > 0


def test_joint_is_the_expected_squared_gradient(setting):
    """Against all rows of the Fisher matrix's root, one backward each; the mean over signs comes near it."""
    model, rollout = setting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importances.Joint, "combine", lambda self, parts: parts.score_KBL[0])
        path = f"python:{FOLDER}.importance:Joint"
        estimate = method_of(path)(model, rollout, Request(path, num_draws=200))[rollout.reasoning_BL]

    rows = ((rollout.segments_BL == Segment.ANSWER).nonzero() - torch.tensor([0, 1])).tolist()
    embedding = model.get_input_embeddings()(rollout.token_BL).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedding, use_cache=False).logits
    exact = torch.zeros(rollout.token_BL.shape)
    for row, position in rows:
        p = logits[row, position].softmax(-1).detach()
        for v in range(0, len(p)):
            scalar = p[v].sqrt() * logits[row, position].log_softmax(-1)[v]
            exact += torch.autograd.grad(scalar, embedding, retain_graph=True)[0].square().sum(-1)
    exact = exact[rollout.reasoning_BL]
    assert torch.corrcoef(torch.stack([estimate, exact]))[0, 1] > 0.98
    assert abs(estimate.sum() / exact.sum() - 1) < 0.15
