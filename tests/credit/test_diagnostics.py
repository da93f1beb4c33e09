"""Diagnostics against hand-made cases."""

import pytest
import torch

from oar_plugin.credit.diagnostics import FALLBACKS, Status, effective_sample_size, summarize, top_share


@pytest.mark.parametrize(
    ("weights", "kept", "size", "top"),
    [([1.0] * 10, 10, 1.0, 0.1), ([0.0] * 3 + [10.0] + [0.0] * 6, 10, 0.1, 1.0), ([1.0, 1.0, 1000.0], 2, 1.0, None)],
    ids=["even", "all on one token", "only kept tokens count"],
)
def test_how_far_weights_are_from_even(weights, kept, size, top):
    weight, keep = torch.tensor([weights]), (torch.arange(len(weights)) < kept)[None]
    assert effective_sample_size(weight, keep).item() == pytest.approx(size)
    if top is not None:
        assert top_share(weight, keep).item() == pytest.approx(top)


def test_shares_are_of_the_responses_that_matter():
    status = torch.tensor([Status.SCORED, Status.NOT_NEEDED, Status.NO_ANSWER, Status.TRUNCATED, Status.CONSTANT])
    metrics = summarize(torch.ones(5, 4), torch.ones(5, 4, dtype=torch.bool), status)
    want = {"scored": 0.2, "answer_found": 0.5, "fallback/no_answer": 0.25, "fallback/any": 0.75}
    assert {name: metrics[name] for name in want} == pytest.approx(want)


def test_a_batch_without_any_need_has_the_counters_all_the_same():
    metrics = summarize(torch.ones(1, 10), torch.ones(1, 10, dtype=torch.bool), torch.tensor([Status.NOT_NEEDED]))
    counters = {f"fallback/{reason.name.lower()}" for reason in FALLBACKS} | {"fallback/any"}
    assert metrics == {"scored": 0.0, **dict.fromkeys(counters, 0.0)}
