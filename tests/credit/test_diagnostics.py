"""Diagnostics against hand-made cases."""

import pytest
import torch

from oar_plugin.credit.diagnostics import FALLBACKS, Status, effective_sample_size, measured, summarize, top_share


def test_every_response_of_a_batch_is_described_by_itself():
    """Against loops: responses of different lengths, weights in any order, some below zero, tokens that do not count."""
    generator = torch.Generator().manual_seed(0)
    weight, keep = torch.randn(5, 47, generator=generator), torch.rand(5, 47, generator=generator) < 0.8
    keep[1, 30:] = keep[2, 4:] = keep[3] = False
    sizes, tops = [], []
    for row, kept in zip(weight, keep, strict=True):
        own = row[kept]
        sizes.append(own.sum() ** 2 / (max(1, len(own)) * (own**2).sum()) if len(own) else 0.0)
        most = max(1, round(0.1 * len(own)))
        tops.append(own.abs().sort(descending=True).values[:most].sum() / own.abs().sum() if len(own) else 0.0)
    torch.testing.assert_close(effective_sample_size(weight, keep), torch.tensor(sizes))
    torch.testing.assert_close(top_share(weight, keep), torch.tensor(tops))
    assert top_share(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]), 0.5).tolist() == [0.75]
    assert effective_sample_size(torch.tensor([[3.0, 9.0]]), torch.tensor([[True, False]])).tolist() == [1.0]


def test_means_are_over_the_scored_responses():
    weight = torch.tensor([[3.0, 0.5, 0.5, 9.0], [1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0], [0.2, 0.2, 9.0, 9.0]])
    keep = torch.tensor([[True, True, True, False], [True] * 4, [True] * 4, [True, True, False, False]])
    status = torch.tensor([Status.SCORED, Status.SCORED, Status.NO_ANSWER, Status.SCORED])
    metrics = summarize(measured(weight, keep), status)
    want = {"ess_ratio": (16 / 28.5 + 2) / 3, "top10_mass": (0.75 + 0.25 + 0.5) / 3, "weight_max": 3.0}
    assert {name: metrics[name] for name in want} == pytest.approx(want)
    assert metrics["reasoning_tokens"] == 3
    below = summarize(measured(weight[3:], keep[3:]), status[3:])
    assert below["weight_max"] == pytest.approx(0.2), "of the tokens that count"


def test_shares_are_of_the_responses_that_matter():
    status = torch.tensor([Status.SCORED, Status.NOT_NEEDED, Status.NO_ANSWER, Status.TRUNCATED, Status.CONSTANT])
    metrics = summarize(torch.ones(5, 4), status)
    want = {"scored": 0.2, "answer_found": 0.5, "fallback/no_answer": 0.25, "fallback/any": 0.75}
    assert {name: metrics[name] for name in want} == pytest.approx(want)


def test_a_batch_without_any_need_has_the_counters_all_the_same():
    metrics = summarize(torch.ones(1, 4), torch.tensor([Status.NOT_NEEDED]))
    counters = {f"fallback/{reason.name.lower()}" for reason in FALLBACKS} | {"fallback/any"}
    assert metrics == {"scored": 0.0, **dict.fromkeys(counters, 0.0)}
