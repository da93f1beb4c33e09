"""The chunked sum over many rows, and what a micro-batch's importance for chains is made of."""

import pytest
import torch
from oar_plugin.credit.onward import onward_importance
from oar_plugin.hosts.onward import OnwardRows, combined_importance, weighted_logits

from oar_plugin.bench.reasoning.model import build_model
from oar_plugin.credit.probe import AnswerRows
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY
from oar_plugin.hosts import onward
from oar_plugin.passes.taps import ModelTaps

ROWS, HIDDEN, VOCABULARY = 7, 5, 11


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_the_gradient_is_that_of_the_sum_over_all_logits(monkeypatch, chunk):
    """Coefficients that depend on the logits are held fixed, and every row has its own."""
    monkeypatch.setattr(onward, "CHUNK", chunk)
    torch.manual_seed(0)
    weight_VH = torch.randn(VOCABULARY, HIDDEN)
    factor_NV = torch.randn(ROWS, VOCABULARY)
    hidden_NH = torch.randn(ROWS, HIDDEN, requires_grad=True)

    def coefficients(logits_NV: torch.Tensor, start: int) -> torch.Tensor:
        assert not logits_NV.requires_grad
        return factor_NV[start : start + len(logits_NV)] * logits_NV

    logits_NV = hidden_NH @ weight_VH.T
    (want,) = torch.autograd.grad((factor_NV * logits_NV.detach() * logits_NV).sum(), hidden_NH)
    weighted_logits(lambda rows: rows @ weight_VH.T, hidden_NH, coefficients).backward()
    torch.testing.assert_close(hidden_NH.grad, want)


def test_no_rows_are_a_scalar_that_can_be_differentiated():
    """A rank whose part of a sequence holds no reasoning still takes part in the backward."""
    hidden_NH = torch.zeros(0, HIDDEN, requires_grad=True)
    weighted_logits(lambda rows: rows, hidden_NH, lambda logits_NV, start: logits_NV).backward()
    assert hidden_NH.grad.shape == (0, HIDDEN)


def test_no_logits_stay_in_the_graph():
    """What autograd keeps for the backward is of the size of the hidden states."""
    hidden_NH = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weight_VH = torch.randn(VOCABULARY, HIDDEN)
    scalar = weighted_logits(lambda rows: rows @ weight_VH.T, hidden_NH, lambda logits_NV, start: logits_NV)
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


def test_entropies_are_noted_at_the_token_that_was_drawn():
    rows = AnswerRows(*(torch.tensor(x) for x in ([1, 4], [0, 1], [0, 0], [3, 3])), torch.ones(2), 2)
    of = OnwardRows(rows, torch.tensor([1, 2]), WHOLE_VOCABULARY, 6)
    logits_NV = torch.randn(2, VOCABULARY)
    of.coefficients(0)(logits_NV, 0)
    want_T = torch.zeros(6)
    want_T[[2, 5]] = torch.distributions.Categorical(logits=logits_NV).entropy()
    torch.testing.assert_close(of.entropy_T, want_T)


def test_signs_do_not_depend_on_how_rows_are_cut_and_differ_by_draw():
    rows = AnswerRows(
        torch.arange(4), torch.zeros(4, dtype=torch.long), torch.arange(4), torch.arange(4), torch.ones(4), 1
    )
    of = OnwardRows(rows, torch.tensor([5]), WHOLE_VOCABULARY, 5)
    logits_NV = torch.randn(4, VOCABULARY)
    whole = of.coefficients(0)(logits_NV, 0)
    parts = torch.cat([of.coefficients(0)(logits_NV[start : start + 2], start) for start in (0, 2)])
    torch.testing.assert_close(parts, whole)
    assert not torch.allclose(of.coefficients(1)(logits_NV, 0), whole)


def test_a_packed_batch_is_combined_response_by_response():
    offsets = torch.tensor([0, 3, 8])
    answer_T, onward_T, entropy_T = torch.rand(3, 8)
    reasoning_T = torch.tensor([False, True, True, False, True, True, True, False])
    together = combined_importance(answer_T, onward_T, entropy_T, reasoning_T, offsets)
    for begin, end in ((0, 3), (3, 8)):
        alone = onward_importance(*(x[None, begin:end] for x in (answer_T, onward_T, entropy_T, reasoning_T)))[0]
        torch.testing.assert_close(together[begin:end], alone)


def test_taps_give_the_weighted_sum_in_place_of_logits():
    model, ids = build_model(0, hidden=16, layers=1), torch.arange(12).view(2, 6)
    rows = torch.tensor([2, 3, 9])
    embedding = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    model(inputs_embeds=embedding).logits.flatten(0, 1)[rows].square().sum().div(2).backward()
    model.zero_grad(set_to_none=True)
    with ModelTaps(model) as taps:
        taps.prepare(rows, coefficients=lambda logits_NV, start: logits_NV, rows_only=True)
        model(input_ids=ids, use_cache=False)
        assert taps.answer_logits is None
        taps.weighted_sum.backward()
        torch.testing.assert_close(taps.embedding.grad, embedding.grad)
