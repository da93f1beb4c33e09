"""Weighted sums of many rows' logits, and rows that are only read, a chunk at a time."""

import pytest
import torch

from oar_plugin.passes import rows
from oar_plugin.passes.rows import read_logits, weighted_logits

ROWS, HIDDEN, VOCABULARY = 7, 5, 11


@pytest.fixture
def tensors():
    """Hidden states, and the weights that project them."""
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_every_row_is_seen_once_in_chunks_and_its_gradient_is_that_of_the_sum_over_all_logits(
    monkeypatch, tensors, chunk
):
    """Coefficients that depend on the logits are held fixed, and every row has its own."""
    monkeypatch.setattr(rows, "CHUNK", chunk)
    (hidden_NH, weight_VH), factor_NV = tensors, torch.randn(ROWS, VOCABULARY)
    logits_NV, seen_NV = hidden_NH @ weight_VH.T, torch.full((2, ROWS, VOCABULARY), torch.nan)

    def seeing(place, logits_NV, chosen):
        assert not logits_NV.requires_grad
        assert len(logits_NV) <= chunk
        assert seen_NV[place, chosen].isnan().all()
        seen_NV[place, chosen] = logits_NV
        return factor_NV[chosen] * logits_NV

    scalar = weighted_logits(lambda chosen: chosen @ weight_VH.T, hidden_NH, lambda *given: seeing(0, *given))
    read_logits(lambda chosen: chosen @ weight_VH.T, hidden_NH, lambda *given: seeing(1, *given))
    torch.testing.assert_close(seen_NV, logits_NV.detach().expand(2, -1, -1))
    (got,), (want,) = (
        torch.autograd.grad(one, hidden_NH) for one in (scalar, (factor_NV * logits_NV.detach() * logits_NV).sum())
    )
    torch.testing.assert_close(got, want)


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
