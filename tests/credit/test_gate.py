"""The gate, its invariants and its edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.credit.gate import gate

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


edge = st.one_of(
    st.just(0.0),
    st.just(1.0),
    st.just(1.0 + 2**-23),
    st.just(1e30),
    st.floats(0, 2**-40, width=32),
    st.floats(0, 10, width=32),
)


@given(st.lists(edge, min_size=1, max_size=12), st.sampled_from([0.0, 0.4, 1.0]), st.floats(0, 4), st.floats(0.01, 1))
@settings(max_examples=300, deadline=None)
def test_promises_hold_at_the_edges(values, tau, beta, floor):
    """Ties, an outlier, differences of one bit, one to three tokens, both ends of tau."""
    importance = torch.tensor(values)[None]
    weights = gate(importance, torch.ones_like(importance, dtype=torch.bool), tau, beta, floor)[0]
    assert weights.isfinite().all()
    assert weights.sum().item() == pytest.approx(len(values), rel=1e-4)
    assert (weights > 0).all()
    assert weights.max() / weights.min() <= (1 + beta) / floor * (1 + 1e-4), "the ratio of two weights has a bound"
    for value in set(importance[0].tolist()):
        same = weights[importance[0] == value]
        assert (same == same[0]).all(), "equal importance, equal weight"


def test_one_token_has_weight_one():
    for tau in (0.0, 0.4, 1.0):
        assert gate(torch.tensor([[7.0]]), torch.ones(1, 1, dtype=torch.bool), tau).item() == 1.0


def test_an_outlier_takes_no_more_than_its_bound():
    """8192 tokens, one of them a million times as important: (1 + beta) over the mean, which is nearly that of the others."""
    importance = torch.full((1, 8192), 0.01)
    importance[0, 100] = 1e4
    weights = gate(importance, torch.ones_like(importance, dtype=torch.bool))[0]
    assert weights[100] == pytest.approx(3.0, rel=1e-3)
    assert weights[0] == pytest.approx(1.0, rel=1e-3)


def test_order_and_kind_of_the_input_do_not_matter():
    """Rows are sorted inside: what comes in stays as it is, in any layout."""
    importance = torch.rand(40, 6).T  # not contiguous
    before = importance.clone()
    mask = torch.rand(6, 40) < 0.8
    weights = gate(importance, mask)
    assert torch.equal(importance, before)
    torch.testing.assert_close(gate(importance.double(), mask), weights)
    turned = torch.randperm(40)
    torch.testing.assert_close(gate(importance[:, turned], mask[:, turned]), weights[:, turned])
