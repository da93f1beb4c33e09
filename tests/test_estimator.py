"""Fallbacks: bad data keeps its advantage, is counted, and never raises."""

import math

import pytest
import torch

from oar_plugin.config import OarConfig
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.gate import gate
from oar_plugin.estimator import reshape


def batch(status=Status.SCORED, **change):
    importance = torch.tensor([[0.0, 1.0, 5.0, 0.1, 0.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
    reasoning = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
    values = {"importance": importance, "reasoning": reasoning, "status": torch.tensor([status, Status.SCORED])}
    values.update(change)
    advantage = torch.tensor([[0.5] * 5, [-1.0, -1.0, -1.0, -1.0, 0.0]])
    return advantage, reshape(advantage, values["importance"], values["reasoning"], values["status"], OarConfig())


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
    importance = torch.tensor([[0.0, bad, 5.0, 0.1, 0.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
    advantage, result = batch(importance=importance)
    assert torch.equal(result.advantage_BL[0], advantage[0])
    assert result.metrics["fallback/non_finite"] == 0.5
    assert torch.isfinite(result.advantage_BL).all()


def test_non_finite_outside_the_reasoning_does_not_matter():
    importance = torch.tensor([[0.0, 1.0, 5.0, 0.1, math.nan], [2.0, 1.0, 0.0, 0.0, 0.0]])
    _, result = batch(importance=importance)
    assert result.metrics["scored"] == 1.0
    assert torch.isfinite(result.advantage_BL).all()


def test_constant_importance_falls_back_and_is_counted():
    _, result = batch(importance=torch.ones(2, 5))
    assert (result.weight_BL == 1).all()
    assert result.metrics["fallback/constant"] == 1.0


def test_max_weight_bounds_every_token_and_keeps_the_total():
    advantage, plain = batch()
    limit = 1.2
    assert plain.weight_BL.max() > limit
    importance = torch.tensor([[0.0, 1.0, 5.0, 0.1, 0.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
    reasoning = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
    status = torch.tensor([Status.SCORED] * 2)
    result = reshape(advantage, importance, reasoning, status, OarConfig(max_weight=limit))
    assert result.metrics["weight_max"] == pytest.approx(limit)
    torch.testing.assert_close(result.advantage_BL.sum(-1), advantage.sum(-1))


def test_the_gate_is_the_one_that_was_asked_for():
    advantage, two_level = batch()
    importance = torch.tensor([[0.0, 1.0, 5.0, 0.1, 0.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
    reasoning = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
    torch.testing.assert_close(two_level.weight_BL[0], torch.tensor([4 / 6, 4 / 6, 12 / 6, 4 / 6, 1.0]))
    config = OarConfig(gate="bi_level")
    bi_level = reshape(advantage, importance, reasoning, torch.tensor([Status.SCORED] * 2), config).weight_BL
    torch.testing.assert_close(bi_level, gate(importance, reasoning, tau=0.4))
    assert not torch.allclose(bi_level, two_level.weight_BL)
