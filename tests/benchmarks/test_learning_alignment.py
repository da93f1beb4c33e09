from dataclasses import replace

import pytest
import torch

from benchmarks.learning import alignment as learning_alignment
from benchmarks.learning.alignment import align
from benchmarks.learning.measure import Run
from benchmarks.tiny.model import build_model

RUN = Run("parallel", "grpo", 1.0, 0)


def test_alignment_of_known_gradients(monkeypatch):
    """Two coordinates: the average is (3, 4); a method that turns one of them round makes 3 - 4 of 7 of the progress."""
    model = torch.nn.Linear(2, 1, bias=False)

    class Fake:
        token_BL = torch.zeros(1, 1)

    def gradient(model, rollout, weight_BL):
        return torch.tensor([3.0, 4.0]) * torch.where(weight_BL[0, 0] == 1, torch.ones(2), torch.tensor([1.0, -1.0]))

    monkeypatch.setattr(learning_alignment, "_rollouts", lambda run, model, count, seed: [Fake()] * count)
    monkeypatch.setattr(learning_alignment, "_gradient", gradient)
    monkeypatch.setattr(learning_alignment, "reshaped_weights", lambda *_: torch.zeros(1, 1))
    grpo, other = align([RUN, replace(RUN, method="uniform")], model, 3, 4)
    assert (grpo.cosine, grpo.progress, grpo.against) == pytest.approx((1.0, 1.0, 0.0))
    assert other.cosine == pytest.approx((9 - 16) / 25)
    assert other.progress == pytest.approx(-1 / 7)
    assert other.against == pytest.approx(-8 / 7)


def test_model_is_left_alone(monkeypatch):
    model = build_model(0, hidden=16, layers=1)
    before = [parameter.clone() for parameter in model.parameters()]
    # A model with random weights is never right: rewards are made up, so that there are advantages.
    monkeypatch.setattr(
        "benchmarks.learning.rollout._rewards", lambda readings: [float(n % 2) for n in range(len(readings))]
    )
    found = align([replace(RUN, prompts=2, copies=2), replace(RUN, method="random", prompts=2, copies=2)], model, 1, 2)
    assert len(found) == 2
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, old)
