"""Diagnostics against hand-made cases."""

import pytest
import torch

from oar_plugin.credit.diagnostics import FALLBACKS, Status, effective_sample_size, summarize, top_share

EVEN = torch.ones(1, 10)
KEEP = torch.ones(1, 10, dtype=torch.bool)


def test_even_weights():
    assert effective_sample_size(EVEN, KEEP).item() == pytest.approx(1.0)
    assert top_share(EVEN, KEEP).item() == pytest.approx(0.1)


def test_all_weight_on_one_token():
    weight = torch.zeros(1, 10)
    weight[0, 3] = 10
    assert effective_sample_size(weight, KEEP).item() == pytest.approx(0.1)
    assert top_share(weight, KEEP).item() == pytest.approx(1.0)


def test_only_kept_tokens_count():
    weight = torch.tensor([[1.0, 1.0, 1000.0]])
    keep = torch.tensor([[True, True, False]])
    assert effective_sample_size(weight, keep).item() == pytest.approx(1.0)


def test_shares_are_of_the_responses_that_matter():
    status = torch.tensor([Status.SCORED, Status.NOT_NEEDED, Status.NO_ANSWER, Status.TRUNCATED, Status.CONSTANT])
    metrics = summarize(torch.ones(5, 4), torch.ones(5, 4, dtype=torch.bool), status)
    assert metrics["scored"] == pytest.approx(0.2)
    assert metrics["answer_found"] == pytest.approx(0.5)
    assert metrics["fallback/no_answer"] == pytest.approx(0.25)
    assert metrics["fallback/any"] == pytest.approx(0.75)


def test_a_batch_without_any_need_has_the_counters_all_the_same():
    metrics = summarize(EVEN, KEEP, torch.tensor([Status.NOT_NEEDED]))
    counters = {f"fallback/{reason.name.lower()}" for reason in FALLBACKS} | {"fallback/any"}
    assert metrics == {"scored": 0.0, **dict.fromkeys(counters, 0.0)}
