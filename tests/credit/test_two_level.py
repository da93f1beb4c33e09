"""The two-level gate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.credit.gate import two_level

scores = st.lists(st.floats(0, 1e6, allow_nan=False, width=32), min_size=1, max_size=40)


@given(st.lists(scores, min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 8))
@settings(max_examples=200, deadline=None)
def test_two_weights_one_border_and_the_mass_is_kept(batch, tau, beta):
    importance = torch.full((len(batch), max(map(len, batch)) + 1), torch.nan)
    mask = torch.zeros_like(importance, dtype=torch.bool)
    for row, values in enumerate(batch):
        importance[row, : len(values)] = torch.tensor(values)
        mask[row, : len(values)] = True
    weights = two_level(importance, mask, tau, beta)
    assert (weights[~mask] == 1).all()
    for row, values in enumerate(batch):
        score = torch.tensor(values).double()
        above = score >= torch.quantile(score, tau)
        want = 1 + beta * above.double()
        torch.testing.assert_close(
            weights[row, : len(values)].double(), want * len(values) / want.sum(), rtol=1e-5, atol=1e-6
        )
        assert above.any(), "the largest is never below"


def test_a_constant_response_and_one_without_reasoning_stay_even():
    assert (two_level(torch.ones(1, 9), torch.ones(1, 9, dtype=torch.bool), 0.85) == 1).all()
    assert (two_level(torch.rand(1, 9), torch.zeros(1, 9, dtype=torch.bool), 0.85) == 1).all()


def test_an_outlier_changes_nothing():
    importance = torch.arange(20.0)[None]
    mask = torch.ones(1, 20, dtype=torch.bool)
    before = two_level(importance, mask, 0.85)
    importance[0, -1] = 1e30
    assert torch.equal(two_level(importance, mask, 0.85), before)
    assert before.max().item() == pytest.approx(3 * 20 / (20 + 2 * 3))
