"""The gate, its invariants and its edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.credit.reshape import gate

scores = st.lists(st.floats(0, 1e6, allow_nan=False, width=32), min_size=1, max_size=40)


def plain_gate(scores: list[float], tau: float, beta: float, floor: float) -> torch.Tensor:
    """One response, written out step by step as in the paper."""
    s = torch.tensor(scores, dtype=torch.float64).log1p()
    spread = s.max() - s.min()
    s = (s - s.min()) / spread if spread > 0 else torch.zeros_like(s)
    q = torch.quantile(s, tau)
    w = [max(float(x / q), floor) if x < q else 1 + beta * float((x - q) / (1 - q)) if q < 1 else 1.0 for x in s]
    w = torch.tensor(w, dtype=torch.float64)
    return w * len(w) / w.sum()


@given(st.lists(scores, min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 4), st.floats(0.01, 1))
@settings(max_examples=200, deadline=None)
def test_a_padded_batch_equals_response_by_response(batch, tau, beta, floor):
    longest = max(map(len, batch))
    importance = torch.zeros(len(batch), longest + 2)
    mask = torch.zeros_like(importance, dtype=torch.bool)
    for row, values in enumerate(batch):
        importance[row, 1 : 1 + len(values)] = torch.tensor(values)
        mask[row, 1 : 1 + len(values)] = True
    importance[~mask] = torch.nan  # whatever stands outside must not matter
    weights = gate(importance, mask, tau, beta, floor)
    for row, values in enumerate(batch):
        got = weights[row, 1 : 1 + len(values)]
        torch.testing.assert_close(got.double(), plain_gate(values, tau, beta, floor), rtol=1e-4, atol=1e-5)
        assert (weights[row][~mask[row]] == 1).all()


@given(scores, st.floats(0, 1), st.floats(0, 4), st.floats(0.01, 1))
@settings(max_examples=200, deadline=None)
def test_mass_is_kept_and_order_is_respected(values, tau, beta, floor):
    importance = torch.tensor(values)[None]
    weights = gate(importance, torch.ones_like(importance, dtype=torch.bool), tau, beta, floor)[0]
    assert weights.sum().item() == pytest.approx(len(values), rel=1e-4)
    assert (weights > 0).all()
    order = importance[0].argsort()
    assert (weights[order].diff() >= -1e-5).all(), "a more important token may not weigh less"


def test_a_constant_response_stays_even():
    importance = torch.full((1, 7), 3.0)
    assert torch.equal(gate(importance, torch.ones(1, 7, dtype=torch.bool)), torch.ones(1, 7))


def test_a_response_without_reasoning_is_all_ones():
    assert torch.equal(gate(torch.rand(2, 5), torch.zeros(2, 5, dtype=torch.bool)), torch.ones(2, 5))


def test_tau_does_not_drift_over_a_batch():
    """The published code overwrote tau with each response's quantile; the last response then saw another gate."""
    one = torch.rand(1, 30)
    many = torch.cat([torch.rand(20, 30) * 100, one])
    mask = torch.ones_like(many, dtype=torch.bool)
    torch.testing.assert_close(gate(many, mask)[-1], gate(one, mask[:1])[0])
