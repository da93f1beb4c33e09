"""How rankings of tokens are judged, by hand; estimators; and the report's tables."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.fidelity.estimators import REFERENCE, added_estimators, counted_work, package_estimators
from benchmarks.fidelity.responses import Batch, Response, Source
from benchmarks.fidelity.scores import (
    auc,
    beyond_position,
    causal_recall,
    mean_over_groups,
    rank_correlation,
    top_overlap,
)
from benchmarks.fidelity.study import Settings, judge, report_on
from benchmarks.fidelity.tables import BASELINE, plus_minus
from benchmarks.report import silent
from benchmarks.statistics import Estimate
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD

OWN = added_estimators(["python:tests.own_importance:Saliency"])
ALL = package_estimators() | OWN


def response(length, seed=0):
    """Four prompt tokens, reasoning, a marker, two answer tokens and one token after the answer."""
    token_T = torch.randint(PAD, (length,), generator=torch.Generator().manual_seed(seed))
    segments_T = torch.tensor([0] * 4 + [1] * (length - 8) + [2, 3, 3, 4])
    causal_T = torch.isin(torch.arange(length), torch.tensor([6, 8]))
    return Response(token_T, segments_T, causal_T, seed != 1, "a question", ["w"] * (length - 4))


def batch_of(*lengths):
    rows = [response(length, seed) for seed, length in enumerate(lengths)]
    return Batch(Source("made", 0, build_model(0), rows, 0, 0.5), rows, "answer_mean", 0, 2**11)


PASSES = {"fisher 1": (1, 1), "fisher 4": (4, 4), "oar_g 4": (5, 4), "entropy": (1, 0), "random": (0, 0)}


@pytest.mark.parametrize("name", ALL)
def test_a_score_depends_on_its_response_alone_and_passes_are_counted(name):
    model = build_model(0, hidden=16, heads=2)
    alone, together = (ALL[name](model, batch)[0] for batch in (batch_of(16), batch_of(16, 21)))
    reasoning = batch_of(16).responses[0].reasoning_R
    torch.testing.assert_close(alone[reasoning].double(), together[reasoning].double(), rtol=2e-3, atol=1e-5)
    with counted_work(model) as work:  # after the first scores, which also run a trial
        ALL[name](model, batch_of(16))
    assert all(parameter.grad is None for parameter in model.parameters())
    if name in PASSES:
        assert [work[way] / 16 for way in ("forward", "backward")] == pytest.approx(PASSES[name])
    if name == REFERENCE:
        assert 1 < work["forward"] / 16 < len(reasoning), "copies read their prefix from a cache"


def test_rank_correlation_overlap_recall_and_auc():
    """Spearman's by hand: ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4."""
    score, reference = torch.tensor([0.0, 5.0, 5.0, 9.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert rank_correlation(score, reference) == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    assert rank_correlation(torch.ones(4), reference) == 0.0
    assert math.isnan(rank_correlation(score, torch.ones(4)))
    assert beyond_position(torch.arange(9.0), torch.arange(9.0).square()) == 0
    ten = torch.arange(10.0)
    assert top_overlap(ten.where(ten > 0, 99.0), ten) == 0.5
    keep, causal = torch.tensor([[True, True, True, True, False]]), torch.tensor([[False, True, True, False, False]])
    assert causal_recall(torch.tensor([[0.1, 5.0, 0.2, 4.0, 9.0]]), keep, causal).item() == 0.5
    assert auc(score.numpy(), np.array([False, True, False, False])) == pytest.approx((1 + 0.5 + 0) / 3)
    assert math.isnan(auc(score.numpy(), np.ones(4, dtype=bool)))


def test_intervals_hold_groups_together():
    """Two groups that differ a lot: the interval is about the scatter within them, not between."""
    mean = mean_over_groups([[0.0, 0.1, math.nan] * 20, [1.0, 0.9] * 20])
    assert (mean.value, mean.count) == (pytest.approx(0.5), 80)
    assert mean.high - mean.low < 0.05
    assert math.isnan(mean_over_groups([[math.nan]]).value)
    assert [plus_minus(Estimate(0.5, 0.4, 0.6, count)) for count in (0, 4, 5)] == ["", "0.50 (4)", "0.50 ± 0.10"]


def test_the_report_has_every_estimator(monkeypatch):
    working = {name: ALL[name] for name in (REFERENCE, BASELINE, "random")}
    for module in ("tables", "study"):
        monkeypatch.setattr(f"benchmarks.fidelity.{module}.package_estimators", lambda: working)
    rows = [response(16 + index, index) for index in range(3)]
    sources = [Source(task, 0, build_model(0, hidden=16, heads=2), rows, 1, 0.5) for task in ("made", "other")]
    also = ("python:tests.own_importance:Saliency",)
    settings = Settings(also=also, max_tokens=32, device="cpu")
    report = report_on(settings, (judge(settings, source, silent) for source in sources))
    for name in [*working, *OWN]:
        assert f"| {name} |" in report.markdown(None)
        assert f'<span class="who">{name}</span>' in report.extra["html"]
    means = pd.DataFrame(json.loads(report.to_json())["runs"]["means"])
    counts = {"float32": 4, "bfloat16": 4, "another seed": 1, "last": 2, "answer_joint": 2}
    assert means.groupby("way").size().to_dict() == {name: 4 * n for name, n in counts.items()}, (
        "tasks, right and wrong"
    )
    exact = means[(means["estimator"] == REFERENCE) & means["way"].isin(["float32", "last", "answer_joint"])]
    assert (exact[["overlap", "spearman"]] == 1).all(axis=None), "each probe has a reference of its own"
