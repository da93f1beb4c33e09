"""The bound on any single token's weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.credit.gate import bounded, gate

scores = st.lists(st.floats(0, 1e6, allow_nan=False, width=32), min_size=1, max_size=40)


def by_bisection(weights: torch.Tensor, limit: float) -> torch.Tensor:
    """`min(c w, limit)` with the `c` that keeps the sum, found the slow way."""
    low, high = 1.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if (weights * middle).clamp_max(limit).sum() > len(weights) else (middle, high)
    return (weights * low).clamp_max(limit)


@given(st.lists(scores, min_size=1, max_size=4), st.floats(1.05, 10), st.floats(0, 8))
@settings(max_examples=200, deadline=None)
def test_no_weight_is_above_the_bound_and_the_mean_and_the_order_stay(batch, limit, beta):
    importance = torch.zeros(len(batch), max(map(len, batch)) + 1)
    mask = torch.zeros_like(importance, dtype=torch.bool)
    for row, values in enumerate(batch):
        importance[row, : len(values)] = torch.tensor(values)
        mask[row, : len(values)] = True
    before = gate(importance, mask, beta=beta)
    after = bounded(before, mask, limit)
    assert after.max() <= max(limit, 1) + 1e-6
    assert (after[~mask] == 1).all()
    for row in range(len(batch)):
        had, has = before[row, mask[row]].double(), after[row, mask[row]].double()
        assert has.mean().item() == pytest.approx(1, abs=1e-5)
        assert (has[had.argsort()].diff() >= -1e-6).all()
        torch.testing.assert_close(has, by_bisection(had, limit), rtol=1e-4, atol=1e-5)


def test_weights_below_the_bound_stay_as_they_are():
    weights = gate(torch.rand(3, 20), torch.ones(3, 20, dtype=torch.bool))
    torch.testing.assert_close(bounded(weights, torch.ones(3, 20, dtype=torch.bool), 3.5), weights)


def test_one_outlier_no_longer_takes_most_of_the_mass():
    """Min-max gives one outlier all of the boost; with 100 tokens at beta = 50 it would weigh 20."""
    importance = torch.full((1, 100), 0.01)
    importance[0, ::2] += 0.001
    importance[0, 7] = 1e3
    mask = torch.ones(1, 100, dtype=torch.bool)
    unbounded = gate(importance, mask, beta=50.0)
    assert unbounded.max() > 20
    weights = bounded(unbounded, mask, 4.0)
    assert weights.max().item() == pytest.approx(4.0)
    assert weights.mean().item() == pytest.approx(1.0)
