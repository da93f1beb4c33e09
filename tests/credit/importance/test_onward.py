import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.credit.gradient import fisher_coefficients
from oar_plugin.credit.onward import NOISE, SURE, onward_coefficients, onward_importance, row_weights

KEEP = torch.tensor([[False, True, True, True, False]])
values = st.lists(st.floats(0, 1e6, width=32), min_size=5, max_size=5).map(lambda v: torch.tensor([v]))
SOME = 1.0
DECISION = (1 - math.exp(-SOME / SURE)) * math.exp(-SOME / NOISE)


@settings(deadline=None)
@given(values, values, values)
def test_range_and_places(answer_BL, onward_BL, entropy_BL):
    found = onward_importance(answer_BL, onward_BL, entropy_BL, KEEP)
    assert ((found >= 0) & (found <= 1)).all()
    assert (found[~KEEP] == 0).all()


@settings(deadline=None)
@given(values, values, values, st.sampled_from([2.0**-8, 4.0, 2.0**10]))
def test_scale_of_either_part_means_nothing(answer_BL, onward_BL, entropy_BL, factor):
    answer_BL, onward_BL = answer_BL + 1e-3, onward_BL + 1e-3
    found = onward_importance(answer_BL, onward_BL, entropy_BL, KEEP)
    torch.testing.assert_close(onward_importance(answer_BL * factor, onward_BL, entropy_BL, KEEP), found)
    torch.testing.assert_close(onward_importance(answer_BL, onward_BL * factor, entropy_BL, KEEP), found)


def test_by_hand():
    """An early result that only what follows reads, filler with an eighth of its influence, and the last result."""
    answer_BL = torch.tensor([[9.0, 0.0, 0.0, 2.0, 9.0]])
    onward_BL = torch.tensor([[9.0, 4.0, 0.5, 0.0, 9.0]])
    found = onward_importance(answer_BL, onward_BL, torch.full((1, 5), SOME), KEEP)
    torch.testing.assert_close(found, DECISION * torch.tensor([[0.0, 1.0, 0.5, 1.0, 0.0]]))


def test_neither_a_copy_nor_noise_was_a_decision():
    entropy_BL = torch.tensor([[0.0, 0.0, 0.6, 12.0, 0.0]])
    found = onward_importance(torch.ones(1, 5), torch.ones(1, 5), entropy_BL, KEEP)[0]
    assert found[1] == 0
    assert found[3] < 0.01 < 0.5 < found[2]


def test_response_without_reasoning_or_influence_is_zero_not_nan():
    nothing = torch.zeros(1, 5)
    assert (onward_importance(nothing, nothing, torch.ones(1, 5), KEEP) == 0).all()
    assert (onward_importance(torch.ones(1, 5), torch.ones(1, 5), torch.ones(1, 5), KEEP & False) == 0).all()


def test_rows_of_filler_hardly_count():
    torch.testing.assert_close(
        row_weights(torch.tensor([0.0, 3.0, 0.5])), torch.tensor([1.0, math.exp(-6), math.exp(-1)])
    )


def test_flattening_gives_a_sure_prediction_a_voice():
    """The Fisher information of a near-certain row is near zero; flattened it is not."""
    logits_NV = torch.tensor([[12.0, 0.0, 0.0, 0.0]])
    sign_NV = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    sharp = onward_coefficients(logits_NV, torch.ones(1), sign_NV, temperature=1.0)
    flat = onward_coefficients(logits_NV, torch.ones(1), sign_NV)
    assert torch.equal(sharp, fisher_coefficients(logits_NV, sign_NV))
    assert flat.norm() > 10 * sharp.norm()
    assert flat.sum().item() == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(onward_coefficients(logits_NV, torch.full((1,), 9.0), sign_NV), 3 * flat)
