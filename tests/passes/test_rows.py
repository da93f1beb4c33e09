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
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN)


def test_the_gradient_is_that_of_the_sum_over_all_logits(chunk, tensors):
    """Coefficients that depend on the logits are held fixed, and every row has its own."""
    hidden_NH, weight_VH = tensors
    factor_NV = torch.randn(ROWS, VOCABULARY)

    def coefficients(logits_NV: torch.Tensor, chosen: slice) -> torch.Tensor:
        assert not logits_NV.requires_grad
        return factor_NV[chosen] * logits_NV

    logits_NV = hidden_NH @ weight_VH.T
    (want,) = torch.autograd.grad((factor_NV * logits_NV.detach() * logits_NV).sum(), hidden_NH)
    weighted_logits(lambda chosen: chosen @ weight_VH.T, hidden_NH, coefficients).backward()
    torch.testing.assert_close(hidden_NH.grad, want)


def test_no_rows_are_a_scalar_that_can_be_differentiated():
    """A rank whose part of a sequence holds no reasoning still takes part in the backward."""
    hidden_NH = torch.zeros(0, HIDDEN, requires_grad=True)
    weighted_logits(lambda chosen: chosen, hidden_NH, lambda logits_NV, chosen: logits_NV).backward()
    assert hidden_NH.grad.shape == (0, HIDDEN)


def test_no_logits_stay_in_the_graph(tensors):
    """What autograd keeps for the backward is of the size of the hidden states."""
    hidden_NH, weight_VH = tensors
    scalar = weighted_logits(lambda chosen: chosen @ weight_VH.T, hidden_NH, lambda logits_NV, chosen: logits_NV)
    nodes, seen = [scalar.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved") and isinstance(saved := getattr(node, name), torch.Tensor):
                assert VOCABULARY not in saved.shape
        nodes += [parent for parent, _ in node.next_functions]
    assert len(seen) > 1


def test_reading_shows_every_row_once_and_leaves_no_graph(chunk, tensors):
    hidden_NH, weight_VH = tensors
    seen_NV = torch.full((ROWS, VOCABULARY), torch.nan)

    def read(logits_NV, chosen):
        assert not logits_NV.requires_grad
        assert len(logits_NV) <= chunk
        assert seen_NV[chosen].isnan().all()
        seen_NV[chosen] = logits_NV

    read_logits(lambda chosen: chosen @ weight_VH.requires_grad_().T, hidden_NH, read)
    torch.testing.assert_close(seen_NV, (hidden_NH @ weight_VH.T).detach())
