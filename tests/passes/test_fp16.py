"""Importance in fp16, whose smallest number is 6e-8 and whose largest 65,504: scalars are scaled so that gradients fit."""

import copy
from unittest import mock

import pytest
import torch

from oar_plugin.passes.gradient import MicroBatchPass
from tests.asked import asked
from tests.own_importance import Saliency
from tests.passes.batch import distance, gradient_pass, padded, rows_of, unpadded

CLOSE = 0.1
TWO = "python:benchmarks.candidates.learning:Onward"  # two backwards


class Loud(Saliency):
    factor = 1e6

    def coefficients(self, number, rows):
        return self.factor * super().coefficients(number, rows)

    def score(self, gradient, embedding):
        assert gradient.dtype != torch.float16  # the check at the start also tries bf16
        return gradient.square().sum(-1) / self.factor**2


class Quiet(Loud):
    factor = 1.0


def of(model, importance, probe="answer_mean", dtype=torch.float16, autocast=False):
    if isinstance(importance, type):
        importance = f"python:{__name__}:{importance.__name__}"
    token_BL, segments_BL, mask_BL = padded(rows_of())
    one = copy.deepcopy(model.half()).to(torch.float32 if autocast else dtype)  # the weights that all have
    with torch.autocast("cpu", dtype, enabled=autocast):
        scores_BL = gradient_pass(one, asked(importance, probe, sigma=0.05), token_BL, segments_BL, mask_BL)
    return unpadded(scores_BL, mask_BL)


@pytest.fixture
def far(model):
    """Embeddings of a size that makes gradients as small as numbers of fp16 can be."""
    far = copy.deepcopy(model)
    far.get_input_embeddings().weight.data.mul_(1e4)
    return far


@pytest.mark.parametrize("probe", ["answer_mean", "answer_joint"])
@pytest.mark.parametrize("importance", ["fisher", "oar_g"])
def test_scores_are_those_of_float32(model, importance, probe):
    want = of(model, importance, probe, torch.float32)
    assert distance(of(model, importance, probe), want) < CLOSE
    assert distance(of(model, importance, probe, autocast=True), want) < CLOSE


@pytest.mark.parametrize(
    ("importance", "probe"), [("fisher", "answer_mean"), ("fisher", "answer_joint"), (TWO, "last")]
)
def test_gradients_that_vanish_unscaled_do_not(far, importance, probe):
    want = of(far, importance, probe, torch.float32)
    assert distance(of(far, importance, probe), want) < CLOSE
    with mock.patch.object(MicroBatchPass, "_fp16_scale", return_value=None):
        assert distance(of(far, importance, probe), want) > 3 * CLOSE


def test_coefficients_that_fp16_cannot_hold(model):
    assert distance(of(model, Loud), of(model, Quiet, dtype=torch.float32)) < CLOSE


def test_what_is_not_finite_leaves_the_other_responses_alone(model):
    whole = of(model, Loud)

    def coefficients(self, number, rows):
        coefficient_NV = self.factor * Saliency.coefficients(self, number, rows)
        coefficient_NV[0] = torch.nan
        return coefficient_NV

    with mock.patch.object(Loud, "coefficients", coefficients):
        first, *others = of(model, Loud)
    assert not torch.isfinite(first).all()
    assert distance(others, whole[1:]) < CLOSE
