"""Predicted importance on a plain model: rows that are scored, rows that are not, what is learned, and what is watched.

That predictions are right on every layout is in tests/hosts/test_engine.py, against a regression of its own.
"""

import logging

import pytest
import torch

from oar_plugin.passes import prediction
from oar_plugin.passes.plain import batch_importance, packed_rows
from oar_plugin.passes.predicted_batch import PredictedBatch
from oar_plugin.passes.prediction import Predictor, agreement, predictor_of
from tests.asked import asked
from tests.hosts.engine import world
from tests.passes.batch import padded, rows_of

SHARED = {"amortize": {"share": world.SHARE}, "temperature": 0.7}


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(prediction, "ENOUGH", world.ENOUGH)


def predict(model, predictor, request, max_tokens=2**13):
    rows = padded(rows_of())
    usable_B = torch.ones(len(rows[0]), dtype=torch.bool)
    packed, alone = packed_rows(*rows)[0], (lambda tensor: tensor)
    batch = PredictedBatch(predictor, request, packed, usable_B, alone, torch.device("cpu"))
    return batch_importance(model, request, *rows, max_tokens, predicted=batch), batch.end_step(usable_B)


@pytest.mark.parametrize("importance", ["fisher", "oar_g", "oar_p"])
def test_some_rows_are_scored_as_ever_and_the_others_are_predicted(model, importance):
    request = asked(importance, replacement_token=world.PAD, **SHARED)
    batch, predictor = padded(rows_of()), predictor_of(request.config)
    want = batch_importance(model, asked(importance, replacement_token=world.PAD, temperature=0.7), *batch)
    first, prediction_B4 = predict(model, predictor, request)
    close = {"rtol": 5e-3 if importance == "oar_g" else 1e-4, "atol": 1e-8}  # float32's rounding of P_noisy - P
    torch.testing.assert_close(first, want, **close)
    assert not prediction_B4[:, 0].any()
    assert prediction_B4[:, 1:3].isnan().all(), "nothing was known before the first step"
    second, prediction_B4 = predict(model, predictor, request)
    predicted_B = prediction_B4[:, 0].bool()
    assert predicted_B.any()
    assert not predicted_B.all()
    torch.testing.assert_close(second[~predicted_B], want[~predicted_B], **close)
    assert ((second[predicted_B] > 0) == (want[predicted_B] > 0)).all(), "the reasoning tokens"
    assert (second[predicted_B] != want[predicted_B]).any()
    assert prediction_B4[:, 1].isnan().equal(predicted_B)
    assert (prediction_B4[:, 3] == predictor.share).all()


def test_a_first_step_scores_no_more_than_it_needs(model, monkeypatch):
    monkeypatch.setattr(prediction, "ENOUGH", 2)
    monkeypatch.setattr(prediction, "FEWEST", 1)
    request = asked("fisher", **SHARED)
    importance, prediction_B4 = predict(model, predictor_of(request.config), request)
    predicted_B = prediction_B4[:, 0].bool()
    assert predicted_B.any()
    assert not predicted_B.all()
    assert (importance[predicted_B] > 0).any(-1).all()


def test_micro_batches_do_not_matter_and_the_model_is_left_as_it_was(model):
    request = asked(**SHARED)
    together, alone = (predictor_of(request.config) for _ in range(2))
    for _ in range(2):
        a, _ = predict(model, together, request)
        b, _ = predict(model, alone, request, max_tokens=1)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-7)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_predicted_rows_keep_nothing_for_a_backward(model):
    """A resumed run begins with a new predictor, which scores all rows of its first step."""
    request = asked(amortize={"share": 1e-9})
    predictor, kept = predictor_of(request.config), []
    for step in range(2):
        kept.append(0)

        def keep(tensor, step=step):
            kept[step] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            predict(model, predictor, request)
    assert kept[0] > kept[1] == 0


def test_predictions_that_agree_too_little_double_the_share_and_say_so_once(model, caplog, monkeypatch):
    monkeypatch.setattr(prediction, "FEWEST", 1)
    request = asked("fisher", amortize={"share": 0.1, "least_overlap": 1.0})
    predictor, shares = predictor_of(request.config), []
    with caplog.at_level(logging.WARNING, "oar_plugin"):
        for step in range(1, 16):
            predict(model, predictor, asked("fisher", seed=step, amortize={"share": 0.1, "least_overlap": 1.0}))
            shares.append(predictor.share)
    assert shares[0] == 0.1
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    (record,) = caplog.records
    assert "amortize.least_overlap=1" in record.getMessage()


def test_a_response_without_usable_scores_teaches_nothing(monkeypatch):
    monkeypatch.setattr(prediction, "ENOUGH", 1)
    clean, spoiled, zeros = (Predictor(world.SHARE, 0.3) for _ in range(3))
    features = _features(2)
    scores_T = torch.rand(len(features.packed.token_T)) + 0.1
    for predictor, bad in ((clean, torch.nan), (spoiled, torch.inf)):
        predictor.learn(features, torch.where(features.packed.response_T == 1, bad, scores_T))
        predictor.end_step(lambda tensor: tensor, torch.device("cpu"))
    assert clean.regression.tokens == (features.response_N == 0).sum()
    assert torch.equal(clean.predict(features), spoiled.predict(features))
    zeros.learn(features, torch.zeros_like(scores_T))
    zeros.end_step(lambda tensor: tensor, torch.device("cpu"))
    assert zeros.regression.tokens == 0


def test_a_prediction_that_is_not_finite_stays_so(monkeypatch):
    """The gate then lets the response fall back, and a metric counts it."""
    monkeypatch.setattr(prediction, "ENOUGH", 1)
    predictor, features = Predictor(world.SHARE, 0.3), _features(1)
    features._hidden_TP[-1] = torch.nan
    predictor.learn(features, torch.rand(len(features.packed.token_T)) + 0.1)
    predictor.end_step(lambda tensor: tensor, torch.device("cpu"))
    assert predictor.regression.tokens > 0
    assert not predictor.predict(features).isfinite().all()


@pytest.mark.parametrize(("enough", "share"), [(1, world.SHARE), (10**6, 1.0)])
def test_engines_that_score_too_few_for_predictions_are_asked_for_all(monkeypatch, enough, share):
    monkeypatch.setattr(prediction, "ENOUGH", enough)
    request, features, rows = asked("oar_p", **SHARED), _features(2), [torch.rand(8) + 0.1 for _ in range(2)]
    given = rows, torch.tensor([True, False])
    every_B, packed = torch.ones(2, dtype=torch.bool), features.packed
    batch = PredictedBatch(
        predictor_of(request.config), request, packed, every_B, lambda x: x, torch.device("cpu"), given
    )
    scores = prediction.Scores(request.importance_object, 20, torch.device("cpu"), True)
    batch.field(packed, scores, -torch.rand(20), [0, 1])
    batch.learn(torch.arange(2), rows)
    assert batch.end_step(every_B)[:, 3].tolist() == pytest.approx([share] * 2)


def _features(responses):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(0, 10 * responses + 1, 10)
    segments_T = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1, 1]).repeat(responses)
    packed = prediction.Packed(torch.arange(10 * responses), segments_T, offsets)
    scores = prediction.Scores(asked("random").importance_object, 10 * responses, torch.device("cpu"), True)
    scores.hidden_TP.normal_(generator=generator)
    return prediction.Features(packed, scores, -torch.rand(10 * responses, generator=generator))


def test_agreement_by_hand():
    ten = torch.arange(10.0).double()
    assert agreement(ten, ten) == (1.0, pytest.approx(1.0))
    assert agreement(-ten, ten) == (0.0, pytest.approx(-1.0))
    assert agreement(ten.where(ten != 8, -1.0), ten)[0] == 0.5
