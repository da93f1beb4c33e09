import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oar_plugin.credit.importance import Onward, Parts, Rows
from oar_plugin.credit.importance.fisher import fisher_coefficients
from oar_plugin.credit.importance.onward import NOISE, SURE, TEMPERATURE, row_weights

KEEP = torch.tensor([[False, True, True, True, False]])
NOTHING, ONES = torch.zeros(1, 5), torch.ones(1, 5)
values = st.lists(st.floats(0, 1e6, width=32), min_size=5, max_size=5).map(lambda v: torch.tensor([v]))
DECISION = (1 - math.exp(-1 / SURE)) * math.exp(-1 / NOISE)  # at an entropy of 1


def combined(answer_BL, reasoning_BL, entropy_BL, keep_BL=KEEP):
    parts = Parts(torch.stack([answer_BL, reasoning_BL]), keep_BL, entropy_BL, NOTHING, NOTHING.long())
    return Onward().combine(parts)


@given(values, values, values, st.sampled_from([2.0**-8, 4.0, 2.0**10]))
def test_range_and_places_and_that_the_scale_of_either_part_means_nothing(answer_BL, reasoning_BL, entropy_BL, factor):
    got = combined(answer_BL, reasoning_BL, entropy_BL)
    assert ((got >= 0) & (got <= 1)).all()
    assert (got[~KEEP] == 0).all()
    answer_BL, reasoning_BL = answer_BL + 1e-3, reasoning_BL + 1e-3
    got = combined(answer_BL, reasoning_BL, entropy_BL)
    torch.testing.assert_close(combined(answer_BL * factor, reasoning_BL, entropy_BL), got)
    torch.testing.assert_close(combined(answer_BL, reasoning_BL * factor, entropy_BL), got)


def test_by_hand():
    """An early result that only what follows reads, filler with an eighth of its influence, and the last result."""
    answer_BL = torch.tensor([[9.0, 0.0, 0.0, 2.0, 9.0]])
    reasoning_BL = torch.tensor([[9.0, 4.0, 0.5, 0.0, 9.0]])
    want = DECISION * torch.tensor([[0.0, 1.0, 0.5, 1.0, 0.0]])
    torch.testing.assert_close(combined(answer_BL, reasoning_BL, ONES), want)


def test_neither_a_copy_nor_noise_was_a_decision():
    got = combined(ONES, ONES, torch.tensor([[0.0, 0.0, 0.6, 12.0, 0.0]]))[0]
    assert got[1] == 0
    assert got[3] < 0.01 < 0.5 < got[2]


def test_response_without_reasoning_or_influence_is_zero_not_nan():
    assert (combined(NOTHING, NOTHING, ONES) == 0).all()
    assert (combined(ONES, ONES, ONES, KEEP & False) == 0).all()


def test_rows_of_filler_hardly_count():
    want = torch.tensor([1.0, math.exp(-6), math.exp(-1)])
    torch.testing.assert_close(row_weights(torch.tensor([0.0, 3.0, 0.5])), want)


def test_flattening_gives_a_sure_prediction_a_voice():
    """The Fisher information of a near-certain row is near zero; flattened it is not."""
    logits_NV = torch.tensor([[12.0, 0.0, 0.0, 0.0]])
    rows = Rows(logits_NV, None, torch.arange(1))
    flat = Onward().coefficients(0, rows)
    assert torch.equal(flat, fisher_coefficients(logits_NV / TEMPERATURE, rows.signs()))
    assert flat.norm() > 10 * fisher_coefficients(logits_NV, rows.signs()).norm()
    assert flat.sum().item() == pytest.approx(0, abs=1e-6)
    entropy_N = torch.tensor([-math.log(9.0) / 2])  # a row of weight 9
    weighted = Onward().coefficients(1, Rows(logits_NV, torch.zeros(1).long(), torch.arange(1), entropy_N))
    torch.testing.assert_close(weighted, 3 * flat)
