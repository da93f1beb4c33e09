"""Weighted sums of many rows' logits, and rows that are only read, a chunk at a time."""

import pytest
import torch

from oar_plugin.passes import rows
from oar_plugin.passes.rows import read_logits, weighted_logits

ROWS, HIDDEN, VOCABULARY = 7, 5, 11


@pytest.fixture(params=[1, 3, 7, 100])
def chunk(monkeypatch, request):
    monkeypatch.setattr(rows, "CHUNK", request.param)
    return request.param


@pytest.fixture
def tensors():
    """Hidden states, and the weights that project them."""
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN, requires_grad=True)


def test_the_gradient_is_that_of_the_sum_over_all_logits(chunk, tensors):
    """Coefficients that depend on the logits are held fixed, and every row has its own."""
    hidden_NH, weight_VH = tensors
    factor_NV = torch.randn(ROWS, VOCABULARY)

    def coefficients(logits_NV: torch.Tensor, chosen: slice) -> torch.Tensor:
        assert not logits_NV.requires_grad
        return factor_NV[chosen] * logits_NV

    logits_NV = hidden_NH @ weight_VH.T
    (want,) = torch.autograd.grad((factor_NV * logits_NV.detach() * logits_NV).sum(), hidden_NH)
    weighted_logits(lambda chosen: chosen @ weight_VH.detach().T, hidden_NH, coefficients).backward()
    torch.testing.assert_close(hidden_NH.grad, want)


def test_no_rows_are_a_scalar_that_can_be_differentiated():
    """A rank whose part of a sequence holds no reasoning still takes part in the backward."""
    hidden_NH = torch.zeros(0, HIDDEN, requires_grad=True)
    weighted_logits(lambda chosen: chosen, hidden_NH, lambda logits_NV, chosen: logits_NV).backward()
    assert hidden_NH.grad.shape == (0, HIDDEN)


def test_no_logits_stay_in_the_graph(tensors):
    """What autograd keeps for the backward is of the size of the hidden states."""
    hidden_NH, weight_VH = tensors
    with torch.autograd.graph.saved_tensors_hooks(saved := [], lambda tensor: tensor):
        pass
