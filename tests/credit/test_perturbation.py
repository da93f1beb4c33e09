"""Counterfactual importance: units, replacements, and importance from the scores of units."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oar_plugin.credit.perturbation import importance_of_units, replacement_seeds, sample_replacements, units


def test_sampled_replacements_follow_the_model_but_never_repeat_the_token():
    logits = torch.tensor([0.5, 0.0, 1.5, -2.0]).log_softmax(-1).expand(20000, 4)
    token = torch.full((20000,), 2)
    drawn = sample_replacements(logits, token, torch.arange(20000))
    want = logits[0].exp() * torch.tensor([1.0, 1.0, 0.0, 1.0])
    share = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(share, want / want.sum(), atol=0.015, rtol=0)
    assert share[2] == 0
    assert torch.equal(drawn, sample_replacements(logits, token, torch.arange(20000)))


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 9))
def test_units_are_a_partition_of_the_reasoning_into_runs(reasoning, span):
    cut = units(reasoning, span)
    assert [t for unit in cut for t in unit] == [t for t, wanted in enumerate(reasoning) if wanted]
    assert all(unit == tuple(range(unit[0], unit[-1] + 1)) for unit in cut)
    assert all(len(unit) <= span for unit in cut)
    for unit, following in itertools.pairwise(cut):
        assert len(unit) == span or unit[-1] + 1 < following[0], "no run is cut before it is full"


def test_each_unit_shares_its_score_out_evenly():
    """A copy that helps the answer counts as zero, NaN stays, and no digit is lost."""
    unit_list = [(1, 2), (4,), (5,), (6,)]
    importance = importance_of_units(unit_list, [0.2, 0.7, -0.5, math.nan], 8)
    assert str(importance.tolist()) == str(torch.tensor([0.0, 0.1, 0.1, 0.0, 0.7, 0.0, math.nan, 0.0]).tolist())
    with pytest.raises(ValueError, match="zip"):
        importance_of_units(unit_list, [0.2] * 5, 8)


def test_replacements_are_drawn_anew_for_each_response_position_and_run():
    ids, positions = torch.tensor([4, 5, 6]), torch.tensor([1, 2])
    drawn = (ids, positions, 7), (ids.flip(0), positions, 7), (ids, positions, 8)
    seeds = [replacement_seeds(*given) for given in drawn]
    assert len(torch.cat(seeds).unique()) == 6
    assert torch.equal(replacement_seeds(ids, positions[1:], 7), seeds[0][1:]), "whatever else is drawn"
