"""Weighted sums of many rows' logits, and rows that are only read, a chunk at a time."""

import pytest
import torch

from oar_plugin.passes import rows
from oar_plugin.passes.rows import projected_back, read_logits, scalar_with

ROWS, HIDDEN, VOCABULARY = 7, 5, 11


@pytest.fixture
def tensors():
    """Hidden states, and the weights that project them."""
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_every_row_is_seen_once_in_chunks_and_its_gradient_is_that_of_the_whole_sum(monkeypatch, tensors, chunk):
    """Coefficients that depend on the logits are held fixed, every row has its own, and the projection has a bias."""
    monkeypatch.setattr(rows, "CHUNK", chunk)
    (hidden_NH, weight_VH), factor_NV, bias_V = tensors, torch.randn(ROWS, VOCABULARY), torch.randn(VOCABULARY)

    def project(hidden_NH):
        return hidden_NH @ weight_VH.T + bias_V

    logits_NV, seen_NV = project(hidden_NH), torch.full((2, ROWS, VOCABULARY), torch.nan)

    def seeing(place, logits_NV, chosen):
        assert not logits_NV.requires_grad
        assert len(logits_NV) <= chunk
        assert seen_NV[place, chosen].isnan().all()
        seen_NV[place, chosen] = logits_NV
        return factor_NV[chosen] * logits_NV

    gradient_NH = projected_back(project, hidden_NH, lambda *given: seeing(0, *given))
    read_logits(project, hidden_NH, lambda *given: seeing(1, *given))
    torch.testing.assert_close(seen_NV, logits_NV.detach().expand(2, -1, -1))
    sums = scalar_with(gradient_NH, hidden_NH), (factor_NV * logits_NV.detach() * logits_NV).sum()
    (got,), (want,) = (torch.autograd.grad(one, hidden_NH) for one in sums)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient_NH, want)


def test_fp16_keeps_coefficients_of_any_size(tensors):
    """Those of a row by themselves: 1e-9 would be 0 in fp16, 1e9 infinite."""
    hidden_NH, weight_VH = (tensor.detach().half() for tensor in tensors)
    coefficient_NV = torch.randn(ROWS, VOCABULARY) * 10.0 ** torch.linspace(-9, 9, ROWS)[:, None]
    got = projected_back(lambda chosen: chosen @ weight_VH.T, hidden_NH, lambda _, chosen: coefficient_NV[chosen])
    want = coefficient_NV @ weight_VH.float()
    assert ((got - want).norm(dim=-1) < 2e-3 * want.norm(dim=-1)).all()


def test_where_there_are_no_rows_the_shape_of_the_logits_is_seen_nevertheless(tensors):
    """A rank without rows takes part in a sum over ranks."""
    hidden_NH, weight_VH = tensors
    shapes = []
    read_logits(lambda chosen: chosen @ weight_VH.T, hidden_NH[:0], lambda logits, _: shapes.append(logits.shape))
    assert shapes == [(0, VOCABULARY)]
