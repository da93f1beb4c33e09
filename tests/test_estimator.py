"""Weights from importance, and fallbacks: bad data keeps its advantage, is counted, and never raises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.gate import bi_level
from oar_plugin.estimator import reshape
from tests.own_importance import Saliency

IMPORTANCE = torch.tensor([[0.0, 1.0, 5.0, 0.1, 0.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
REASONING = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
OWN_GATE = "python:tests.own_importance:upper_half"


def batch(status=Status.SCORED, scores=IMPORTANCE, **settings):
    """Advantages, and what becomes of them."""
    advantage = torch.tensor([[0.5] * 5, [-1.0, -1.0, -1.0, -1.0, 0.0]])
    status_B = torch.tensor([status, Status.SCORED])
    return advantage, reshape(advantage, scores, REASONING, status_B, OarConfig(**settings))


def test_the_total_of_a_response_is_kept():
    advantage, result = batch()
    torch.testing.assert_close(result.advantage_BL.sum(-1), advantage.sum(-1))
    assert not torch.equal(result.advantage_BL, advantage)
    assert result.metrics["scored"] == 1.0


def test_tokens_that_are_not_reasoning_keep_weight_one():
    _, result = batch()
    assert result.weight_BL[0, 4] == 1
    assert (result.weight_BL[1, 3:] == 1).all()


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.SCORED])
def test_a_response_that_was_not_scored_is_plain_grpo(status):
    advantage, result = batch(status)
    assert torch.equal(result.advantage_BL[0], advantage[0])
    assert not torch.equal(result.advantage_BL[1], advantage[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_importance_falls_back_and_is_counted(bad):
    importance = IMPORTANCE.clone()
    importance[0, 1] = bad
    advantage, result = batch(scores=importance)
    assert torch.equal(result.advantage_BL[0], advantage[0])
    assert result.metrics["fallback/non_finite"] == 0.5
    assert torch.isfinite(result.advantage_BL).all()


def test_non_finite_outside_the_reasoning_does_not_matter():
    importance = IMPORTANCE.clone()
    importance[0, 4] = math.nan
    _, result = batch(scores=importance)
    assert result.metrics["scored"] == 1.0
    assert torch.isfinite(result.advantage_BL).all()


def test_constant_importance_falls_back_and_is_counted():
    _, result = batch(scores=torch.ones(2, 5))
    assert (result.weight_BL == 1).all()
    assert result.metrics["fallback/constant"] == 1.0


def test_the_gate_is_the_one_that_was_asked_for():
    _, two_level = batch()
    torch.testing.assert_close(two_level.weight_BL[0], torch.tensor([4 / 6, 4 / 6, 12 / 6, 4 / 6, 1.0]))
    _, paper = batch(importance="oar_g", gate="bi_level")
    torch.testing.assert_close(paper.weight_BL, bi_level(IMPORTANCE, REASONING, tau=0.4))
    assert not torch.allclose(paper.weight_BL, two_level.weight_BL)
    _, own = batch(gate=OWN_GATE)
    torch.testing.assert_close(own.weight_BL[0], two_level.weight_BL[0])
    torch.testing.assert_close(own.weight_BL[1], torch.tensor([9 / 5, 3 / 5, 3 / 5, 1.0, 1.0]))


# ---- scales


@pytest.mark.parametrize("name", ["oar_g", "oar_p", "hybrid", "entropy"])
def test_scores_in_nats_reach_the_gate_as_they_are(name):
    _, one = batch(importance=name, gate="bi_level")
    torch.testing.assert_close(one.weight_BL, bi_level(IMPORTANCE, REASONING, tau=0.4))
    _, scaled = batch(scores=1e3 * IMPORTANCE, importance=name, gate="bi_level")
    assert not torch.allclose(scaled.weight_BL, one.weight_BL, rtol=1e-2)


@pytest.mark.parametrize("gate", ["bi_level", "two_level", OWN_GATE])
@pytest.mark.parametrize("name", ["fisher", "python:tests.own_importance:Saliency"])
@given(
    st.lists(st.lists(st.integers(0, 1000), min_size=2, max_size=12), min_size=1, max_size=3),
    st.sampled_from([2.0**-10, 1e-3, 1e6, 2.0**40]),
)
@settings(max_examples=25, deadline=None)
def test_scores_of_an_arbitrary_scale_have_none(name, gate, rows, factor):
    """The Fisher norm goes by the inverse square of the embeddings' size, which means nothing."""
    importance = torch.zeros(len(rows), 12)
    reasoning = torch.arange(12) < torch.tensor([[len(row)] for row in rows])
    importance[reasoning] = torch.tensor([float(value) for row in rows for value in row])
    # Whether a score is above or at a quantile or mean that it equals is a matter of rounding: the factor is a power of two.
    factor = factor if gate == "bi_level" else 2.0 ** round(math.log2(factor))
    config, status = OarConfig(importance=name, gate=gate), torch.zeros(len(rows))
    one, scaled = (
        reshape(torch.ones(reasoning.shape), values, reasoning, status, config)
        for values in (importance, factor * importance)
    )
    torch.testing.assert_close(scaled.weight_BL, one.weight_BL, rtol=1e-4, atol=1e-5)
    assert torch.equal(scaled.status_B, one.status_B)


# ---- more than tau of the scores at the minimum


def test_only_what_is_above_the_minimum_is_boosted():
    """One token of twenty moved the answer. The quantile is the minimum, and all twenty are at or above it."""
    importance, everywhere = torch.zeros(2, 20), torch.ones(2, 20, dtype=torch.bool)
    importance[0, 7] = 3.0
    one = reshape(torch.ones(2, 20), importance, everywhere, torch.zeros(2), OarConfig())
    want = torch.full((20,), 20 / 22)
    want[7] = 60 / 22
    torch.testing.assert_close(one.weight_BL[0], want)
    assert (one.weight_BL[1] == 1).all()
    assert one.status_B.tolist() == [Status.SCORED, Status.CONSTANT]
    assert one.metrics["fallback/constant"] == 0.5


@given(st.integers(2, 40), st.integers(1, 40), st.floats(0, 1), st.floats(0.1, 8), st.sampled_from([0.0, 0.5, 1e6]))
@settings(max_examples=50, deadline=None)
def test_a_weight_above_one_is_never_at_the_minimum(length, at_minimum, tau, beta, lowest):
    """And a response has weights other than 1 exactly where it is not constant; its mass is kept."""
    importance = lowest + (torch.arange(length) - at_minimum + 1).clamp_min(0).float()[None]
    everywhere = torch.ones(1, length, dtype=torch.bool)
    config = OarConfig(tau=tau, beta=beta)
    one = reshape(torch.ones(1, length), importance, everywhere, torch.zeros(1), config)
    constant = at_minimum >= length
    assert (one.status_B.item() == Status.CONSTANT) == constant
    assert one.metrics["fallback/constant"] == constant
    assert (one.weight_BL == 1).all().item() == constant
    assert (one.weight_BL[importance == lowest] <= 1).all()
    assert one.weight_BL.sum().item() == pytest.approx(length, rel=1e-5)


# ---- gates and importances of a user's own


class Nats(Saliency):
    arbitrary_scale = False


def breaks_some(importance_BL, reasoning_BL, tau, beta, floor):
    """By the largest score: weights that are not finite, do not keep the mass, or touch other tokens."""
    weight_BL = bi_level(importance_BL, reasoning_BL, tau, beta, floor)
    highest_B1 = importance_BL.masked_fill(~reasoning_BL, 0).amax(-1, keepdim=True)
    weight_BL = torch.where(highest_B1 == 7, torch.nan, weight_BL)
    weight_BL = torch.where(highest_B1 == 8, 2 * weight_BL, weight_BL)
    return torch.where((highest_B1 == 9) & ~reasoning_BL, 0.5, weight_BL)


def test_a_response_that_breaks_an_own_gate_falls_back_and_others_keep_their_weights():
    importance = torch.tensor([[0.0, 1, 5, 2, 0], [0, 1, 7, 2, 0], [0, 1, 8, 2, 0], [0, 1, 9, 2, 0]])
    reasoning = (torch.arange(5) < 4).expand(4, 5)
    config = OarConfig(importance=f"python:{__name__}:Nats", gate=f"python:{__name__}:breaks_some")
    one = reshape(torch.full((4, 5), 0.5), importance, reasoning, torch.zeros(4), config)
    assert one.status_B.tolist() == [Status.SCORED] + [Status.NON_FINITE] * 3
    torch.testing.assert_close(one.weight_BL[:1], bi_level(importance[:1], reasoning[:1], config.quantile))
    assert (one.weight_BL[1:] == 1).all()
    assert (one.advantage_BL[1:] == 0.5).all()
    assert one.metrics["fallback/non_finite"] == 0.75
    assert one.metrics["scored"] == 0.25


@pytest.mark.parametrize("name", ["fisher", f"python:{__name__}:Nats"])
def test_scores_that_a_gate_was_not_made_for_fall_back(name):
    """A logarithm of something below -1: the response keeps its advantage, and is counted."""
    scores = IMPORTANCE.clone()
    scores[0, 3] = -5.0
    advantage, one = batch(scores=scores, importance=name, gate="bi_level")
    assert one.status_B.tolist() == [Status.NON_FINITE, Status.SCORED]
    assert torch.equal(one.advantage_BL[0], advantage[0])
    assert not torch.equal(one.advantage_BL[1], advantage[1])
    assert torch.isfinite(one.advantage_BL).all()
