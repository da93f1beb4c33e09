"""Attention patching: exact where it claims to be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fidelity.patching import patching_importance, principal_coefficients, replaced_key_effect


def attend(query, key, value):
    length = query.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (query @ key.mT).masked_fill(future, -torch.inf).softmax(-1) @ value


@given(st.integers(0, 1000), st.sampled_from([0.3, 3.0, 30.0]), st.sampled_from([2, 5, 256]))
@settings(max_examples=25, deadline=None)
def test_the_effect_is_what_happens_when_key_and_value_are_replaced(seed, sharpness, chunk):
    """Also where the softmax is saturated, which a gradient cannot see."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, gradient, other_key, other_value = torch.randn(6, 2, 7, 4, generator=generator)
    query = query * sharpness
    effect, bound = replaced_key_effect(query, key, value, gradient, other_key, other_value, chunk=chunk)
    clean = attend(query, key, value)
    for t in range(7):
        keys, values = key.clone(), value.clone()
        keys[:, t], values[:, t] = other_key[:, t], other_value[:, t]
        change = (attend(query, keys, values) - clean)[:, t + 1 :]
        later = gradient[:, t + 1 :]
        torch.testing.assert_close(effect[:, t], (later * change).sum((1, 2)), rtol=1e-3, atol=1e-3)
        want = (later.square().sum(-1) * change.square().sum(-1)).sum(1)
        torch.testing.assert_close(bound[:, t], want, rtol=1e-3, atol=1e-3)


def test_a_key_replaced_by_itself_changes_nothing():
    query, key, value, gradient = torch.randn(4, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    effect, bound = replaced_key_effect(query, key, value, gradient, key, value)
    assert effect.abs().max() < 1e-4
    assert bound.abs().max() < 1e-4


def test_importance_is_zero_only_where_both_are():
    effect, bound = torch.tensor([0.0, -2.0, 2.0]), torch.tensor([4.0, 9.0, 9.0])
    assert patching_importance(effect, bound).tolist() == [0.0, 6.0, 6.0]


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_principal_coefficients_carry_the_largest_eigenvalue(scale):
    """`c` is a direction of the logits; what counts is how much of the Fisher matrix lies along it."""
    logits = scale * torch.randn(20, 12, generator=torch.Generator().manual_seed(3))
    p = logits.double().softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    got = principal_coefficients(logits).double()
    along = torch.einsum("bv,bvw,bw->b", got, fisher, got) / got.square().sum(-1)
    largest = torch.linalg.eigvalsh(fisher)[:, -1]
    assert (along > 0.97 * largest).all()
    torch.testing.assert_close(got.square().sum(-1), largest, rtol=0.05, atol=1e-9)
