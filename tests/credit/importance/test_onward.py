import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.credit.importance import Onward, Parts, Rows
from oar_plugin.credit.importance.fisher import fisher_coefficients
from oar_plugin.credit.importance.onward import NOISE, SURE, TEMPERATURE, row_weights

KEEP = torch.tensor([[False, True, True, True, False]])
values = st.lists(st.floats(0, 1e6, width=32), min_size=5, max_size=5).map(lambda v: torch.tensor([v]))
SOME = 1.0
DECISION = (1 - math.exp(-SOME / SURE)) * math.exp(-SOME / NOISE)


def combined(answer_BL, reasoning_BL, entropy_BL, keep_BL=KEEP):
    nothing_BL = torch.zeros_like(answer_BL)
    parts = Parts(torch.stack([answer_BL, reasoning_BL]), keep_BL, entropy_BL, nothing_BL, nothing_BL.long())
    return Onward().combine(parts)


def coefficients(logits_NV, number, entropy_N=None):
    rows = Rows(logits_NV, torch.zeros(len(logits_NV), dtype=torch.long), torch.arange(len(logits_NV)), entropy_N)
    return Onward().coefficients(number, rows)


@settings(deadline=None)
@given(values, values, values)
def test_range_and_places(answer_BL, reasoning_BL, entropy_BL):
    found = combined(answer_BL, reasoning_BL, entropy_BL)
    assert ((found >= 0) & (found <= 1)).all()
    assert (found[~KEEP] == 0).all()


@settings(deadline=None)
@given(values, values, values, st.sampled_from([2.0**-8, 4.0, 2.0**10]))
def test_scale_of_either_part_means_nothing(answer_BL, reasoning_BL, entropy_BL, factor):
    answer_BL, reasoning_BL = answer_BL + 1e-3, reasoning_BL + 1e-3
    found = combined(answer_BL, reasoning_BL, entropy_BL)
    torch.testing.assert_close(combined(answer_BL * factor, reasoning_BL, entropy_BL), found)
    torch.testing.assert_close(combined(answer_BL, reasoning_BL * factor, entropy_BL), found)


def test_by_hand():
    """An early result that only what follows reads, filler with an eighth of its influence, and the last result."""
    answer_BL = torch.tensor([[9.0, 0.0, 0.0, 2.0, 9.0]])
    reasoning_BL = torch.tensor([[9.0, 4.0, 0.5, 0.0, 9.0]])
    found = combined(answer_BL, reasoning_BL, torch.full((1, 5), SOME))
    torch.testing.assert_close(found, DECISION * torch.tensor([[0.0, 1.0, 0.5, 1.0, 0.0]]))


def test_neither_a_copy_nor_noise_was_a_decision():
    entropy_BL = torch.tensor([[0.0, 0.0, 0.6, 12.0, 0.0]])
    found = combined(torch.ones(1, 5), torch.ones(1, 5), entropy_BL)[0]
    assert found[1] == 0
    assert found[3] < 0.01 < 0.5 < found[2]


def test_response_without_reasoning_or_influence_is_zero_not_nan():
    nothing = torch.zeros(1, 5)
    assert (combined(nothing, nothing, torch.ones(1, 5)) == 0).all()
    assert (combined(torch.ones(1, 5), torch.ones(1, 5), torch.ones(1, 5), KEEP & False) == 0).all()


def test_rows_of_filler_hardly_count():
    torch.testing.assert_close(
        row_weights(torch.tensor([0.0, 3.0, 0.5])), torch.tensor([1.0, math.exp(-6), math.exp(-1)])
    )


def test_flattening_gives_a_sure_prediction_a_voice():
    """The Fisher information of a near-certain row is near zero; flattened it is not."""
    logits_NV = torch.tensor([[12.0, 0.0, 0.0, 0.0]])
    sharp = fisher_coefficients(logits_NV, Rows(logits_NV, None, torch.arange(1)).signs())
    flat = coefficients(logits_NV, 0)
    assert torch.equal(
        flat, fisher_coefficients(logits_NV / TEMPERATURE, Rows(logits_NV, None, torch.arange(1)).signs())
    )
    assert flat.norm() > 10 * sharp.norm()
    assert flat.sum().item() == pytest.approx(0, abs=1e-6)
    weighted = coefficients(logits_NV, 1, torch.full((1,), -math.log(9.0) / 2))  # a row of weight 9
    torch.testing.assert_close(weighted, 3 * flat)
