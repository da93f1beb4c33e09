"""Weights from importance, and fallbacks: bad data keeps its advantage, is counted, and never raises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status, summarize
from oar_plugin.credit.gate import bi_level
from oar_plugin.estimator import needs_credit, reshape, weigh_rows
from oar_plugin.passes.request import MEASURES, STATUS, WEIGHTS, Request
from tests.asked import GIVEN
from tests.own_importance import Saliency

IMPORTANCE = torch.tensor([[0.0, 1.0, 5.0, 0.1, 0.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
REASONING = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
ADVANTAGE = torch.tensor([[0.5] * 5, [-1.0, -1.0, -1.0, -1.0, 0.0]])
OWN_GATE = "python:tests.own_importance:upper_half"


def batch(status=Status.SCORED, scores=IMPORTANCE, at=None, **settings):
    """What becomes of the two responses' advantages; `at`: another score for a token of the first."""
    scores = scores.clone()
    for token, value in (at or {}).items():
        scores[0, token] = value
    return reshape(ADVANTAGE, scores, REASONING, torch.tensor([status, Status.SCORED]), OarConfig(**settings))


def even(scores, reasoning=None, **settings):
    """What becomes of an advantage of 1 for every token of responses that were all scored."""
    reasoning = torch.ones_like(scores, dtype=torch.bool) if reasoning is None else reasoning
    return reshape(torch.ones_like(scores), scores, reasoning, torch.zeros(len(scores)), OarConfig(**settings))


class Nats(Saliency):
    arbitrary_scale = False


NATS = f"python:{__name__}:Nats"


@pytest.mark.parametrize(("rewards", "groups", "needed"), GIVEN["needs_credit"])
def test_a_group_needs_credit_if_its_rewards_differ_by_more_than_rounding(rewards, groups, needed):
    reward_BP = torch.tensor(rewards).view(len(groups), -1)
    assert needs_credit(torch.full((len(groups), 3), 0.056), reward_BP, groups).tolist() == list(map(bool, needed))


def test_the_total_of_a_response_is_kept_and_the_gate_is_the_one_that_was_asked_for():
    two_level, own = batch(), batch(gate=OWN_GATE).weight_BL
    torch.testing.assert_close(two_level.advantage_BL.sum(-1), ADVANTAGE.sum(-1))
    torch.testing.assert_close(two_level.advantage_BL, two_level.weight_BL * ADVANTAGE)
    assert two_level.metrics["scored"] == 1.0
    assert batch(at={4: math.nan}).advantage_BL.equal(two_level.advantage_BL), "outside of the reasoning"
    torch.testing.assert_close(two_level.weight_BL[0], torch.tensor([4 / 6, 4 / 6, 12 / 6, 4 / 6, 1.0]))
    torch.testing.assert_close(own[0], two_level.weight_BL[0])
    torch.testing.assert_close(own[1], torch.tensor([9 / 5, 3 / 5, 3 / 5, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("given", "status"),
    [
        *(({"status": status}, status) for status in Status if status != Status.SCORED),
        ({"at": {1: math.nan}}, Status.NON_FINITE),
        ({"at": {1: math.inf}}, Status.NON_FINITE),
        # Scores that a gate was not made for, a logarithm of something below -1.
        ({"at": {3: -5.0}, "gate": "bi_level", "importance": "fisher"}, Status.NON_FINITE),
        ({"at": {3: -5.0}, "gate": "bi_level", "importance": NATS}, Status.NON_FINITE),
        ({"at": {1: 0.0, 2: 0.0, 3: 0.0}}, Status.CONSTANT),
    ],
)
def test_a_response_that_has_no_scores_is_plain_grpo_and_counted(given, status):
    result = batch(**given)
    assert result.status_B.tolist() == [status, Status.SCORED]
    assert torch.equal(result.advantage_BL[0], ADVANTAGE[0])
    assert not torch.equal(result.advantage_BL[1], ADVANTAGE[1])
    assert torch.isfinite(result.advantage_BL).all()
    if status is not Status.NOT_NEEDED:
        assert result.metrics[f"fallback/{status.name.lower()}"] == 0.5


@pytest.mark.parametrize("name", ["oar_g", "oar_p", "entropy"])
def test_scores_in_nats_reach_the_gate_as_they_are(name):
    one = batch(importance=name, gate="bi_level").weight_BL
    torch.testing.assert_close(one, bi_level(IMPORTANCE, REASONING, tau=0.4))
    scaled = batch(scores=1e3 * IMPORTANCE, importance=name, gate="bi_level").weight_BL
    assert not torch.allclose(scaled, one, rtol=1e-2)


@pytest.mark.parametrize("gate", ["bi_level", "two_level", OWN_GATE])
@pytest.mark.parametrize("name", ["fisher", "python:tests.own_importance:Saliency"])
@given(
    st.lists(st.lists(st.integers(0, 1000), min_size=2, max_size=12), min_size=1, max_size=3),
    st.sampled_from([2.0**-10, 1e-3, 1e6, 2.0**40]),
)
@settings(max_examples=25)
def test_scores_of_an_arbitrary_scale_have_none_and_only_constant_ones_fall_back(name, gate, rows, factor):
    """The Fisher norm goes by the inverse square of the embeddings' size, which means nothing."""
    importance = torch.zeros(len(rows), 12)
    reasoning = torch.arange(12) < torch.tensor([[len(row)] for row in rows])
    importance[reasoning] = torch.tensor([float(value) for row in rows for value in row])
    # Whether a score is above or at a quantile or mean that it equals is a matter of rounding: the factor is a power of two.
    factor = factor if gate == "bi_level" else 2.0 ** round(math.log2(factor))
    one, scaled = (even(k * importance, reasoning, importance=name, gate=gate) for k in (1, factor))
    torch.testing.assert_close(scaled.weight_BL, one.weight_BL, rtol=1e-4, atol=1e-5)
    assert torch.equal(scaled.status_B, one.status_B)
    constant = torch.tensor([len(set(row)) == 1 for row in rows])
    assert torch.equal(one.status_B == Status.CONSTANT, constant)
    assert torch.equal((one.weight_BL == 1).all(-1), constant)


def breaks_some(importance_BL, reasoning_BL, tau, beta, floor):
    """By the largest score: weights that are not finite, do not keep the mass, or touch other tokens, or an error."""
    assert not (importance_BL == 10).any()
    weight_BL = bi_level(importance_BL, reasoning_BL, tau, beta, floor)
    highest_B1 = importance_BL.masked_fill(~reasoning_BL, 0).amax(-1, keepdim=True)
    weight_BL = torch.where(highest_B1 == 7, torch.nan, weight_BL)
    weight_BL = torch.where(highest_B1 == 8, 2 * weight_BL, weight_BL)
    return torch.where((highest_B1 == 9) & ~reasoning_BL, 0.5, weight_BL)


def test_responses_fall_back_where_an_own_gate_raises(caplog):
    settings = {"importance": NATS, "gate": f"python:{__name__}:breaks_some"}
    one = [even(torch.tensor([[0.0, 10]]), torch.ones(1, 2) > 0, **settings) for _ in range(2)][1]
    assert one.status_B.tolist() == [Status.NON_FINITE]
    assert one.weight_BL.tolist() == [[1, 1]]
    assert len(caplog.records) == 1


def test_a_response_that_breaks_an_own_gate_falls_back_and_others_keep_their_weights():
    importance = torch.tensor([[0.0, 1, highest, 2, 0] for highest in (5, 7, 8, 9)])
    reasoning = (torch.arange(5) < 4).expand(4, 5)
    one = even(importance, reasoning, importance=NATS, gate=f"python:{__name__}:breaks_some")
    assert one.status_B.tolist() == [Status.SCORED] + [Status.NON_FINITE] * 3
    torch.testing.assert_close(one.weight_BL[:1], bi_level(importance[:1], reasoning[:1], OarConfig().quantile))
    assert (one.weight_BL[1:] == 1).all()
    assert (one.advantage_BL[1:] == 1).all()
    assert (one.metrics["fallback/non_finite"], one.metrics["scored"]) == (0.75, 0.25)


@pytest.mark.parametrize("gate", ["bi_level", "two_level", OWN_GATE])
def test_rows_that_ranks_weigh_for_themselves_get_the_weights_of_the_whole_padded_batch(gate):
    """Bit for bit, and so are the metrics: every status, rows of many lengths, and lengths that differ between the ranks."""
    generator = torch.Generator().manual_seed(0)
    importance = [(3 * torch.randn(length, generator=generator)).exp() for length in range(1, 401)]
    importance[7][3], importance[11][5], importance[13][:] = math.nan, math.inf, 0.5
    segments = [torch.where(torch.arange(len(row)) < len(row) - 1, 1, 2) for row in importance]
    statuses = [Status.SCORED if row % 3 else Status(row // 3 % len(Status)) for row in range(len(importance))]
    status_B = torch.tensor(statuses).masked_fill(torch.arange(400) == 0, Status.NO_REASONING)
    config = Request.from_dict(Request.of_step(OarConfig(gate=gate), step=1).to_dict()).config
    one, segment_BL = pad_sequence(importance, True), pad_sequence(segments, True)
    whole = reshape(torch.ones_like(one), one, segment_BL == Segment.REASONING, status_B, OarConfig(gate=gate))
    assert {Status.CONSTANT, Status.NON_FINITE, *statuses} == {*whole.status_B.tolist()}
    status_of_parts, measure_B4 = torch.zeros_like(status_B), torch.zeros(400, 4)
    for rank in range(7):
        rows = slice(rank, None, 7)
        answer = weigh_rows(importance[rows], segments[rows], status_B[rows], config)
        status_of_parts[rows], measure_B4[rows] = torch.cat(answer[STATUS]), torch.stack(answer[MEASURES])
        weights = zip(answer[WEIGHTS], whole.weight_BL[rows], strict=True)
        assert all(weight_L.equal(w_L[: len(weight_L)]) for weight_L, w_L in weights)
    assert status_of_parts.equal(whole.status_B)
    assert summarize(measure_B4, status_of_parts) == whole.metrics
