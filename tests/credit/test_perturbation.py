"""Counterfactual importance: units, budgets, and estimates for units without a copy."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oar_plugin.credit.perturbation import Search, copies_of_budget, replacement_seeds, sample_replacements, units


def run(unit_list, length, score, budget=1.0, gradient=None):
    """Drive a search to its end; returns importance and the units of each round."""
    search, asked = Search(unit_list, length, budget, gradient), []
    while search.wanted:
        asked.append(search.wanted)
        assert search.importance is None
        search.send([score(unit) for unit in search.wanted])
    return search.importance, asked


def singles(number):
    return [(token,) for token in range(number)]


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


@pytest.mark.parametrize(
    ("budget", "number", "copies"),
    [(1, 10, 10), (0.3, 10, 3), (0.25, 10, 3), (0.01, 10, 1), (4, 10, 4), (50, 10, 10), (0.1, 30, 3)],
)
def test_budgets_are_shares_up_to_one_and_numbers_above(budget, number, copies):
    assert copies_of_budget(budget, number) == copies


def test_exhaustive_search_gives_each_unit_its_score_shared_out_evenly():
    """A copy that helps the answer counts as zero, NaN stays, and no digit is lost."""
    scores = {1: 0.2, 4: 0.7, 5: -0.5, 6: math.nan}
    importance, asked = run([(1, 2), (4,), (5,), (6,)], 8, lambda unit: scores[unit[0]])
    assert str(importance.tolist()) == str([0.0, 0.1, 0.1, 0.0, 0.7, 0.0, math.nan, 0.0])
    assert asked == [[(1, 2), (4,), (5,), (6,)]]


@pytest.mark.parametrize(
    ("gradient", "budget", "scores", "chosen", "importance"),
    [
        # The ratio of exact to estimated scores is 1 : 2.
        ([8, 1, 2, 6], 2, [4, 9, 9, 3], [0, 3], [4, 0.5, 1, 3]),
        # One token with all the importance, a thousand times its estimate, does not raise the other estimates.
        ([5, 4, 3, 2, 1], 4, [5000, 4, 3, 2, 1], [0, 1, 2, 3], [5000, 4, 3, 2, 1]),
        # Units whose estimate is zero say nothing about the scale.
        ([2, 0, 0, 0], 3, [1, 1, 1, 1], [0, 1, 2], [1, 1, 1, 0]),
        # An estimate never beats the largest exact score.
        ([1, 1], 1.5, [2, 2], [0], [2, 2]),
        ([0, 0], 1.5, [2, 2], [0], [2, 0]),
    ],
)
def test_gradient_chooses_and_the_others_are_calibrated(gradient, budget, scores, chosen, importance):
    number, gradient = len(gradient), [float(value) for value in gradient]
    got, asked = run(singles(number), number, lambda unit: float(scores[unit[0]]), budget, gradient)
    assert [sorted(unit for (unit,) in one) for one in asked] == [chosen]
    assert got.tolist() == importance


def test_blocks_lead_to_the_tokens_that_matter():
    """64 tokens, one of which decides: a quarter of the copies find it, and its neighbours are not blamed."""
    importance, asked = run(singles(64), 64, lambda unit: 5.0 if 21 in unit else 0.01, budget=0.25)
    assert [len(r) for r in asked] == [8, 8]
    assert asked[1] == [(t,) for t in range(16, 24)]
    assert importance.argmax() == 21
    assert importance[[20, 21]].tolist() == pytest.approx([0.01, 5])
    assert 0 < importance[40] < 0.01


def test_a_small_budget_takes_larger_blocks_and_no_second_round():
    importance, (asked,) = run(singles(40), 40, lambda unit: float(unit[0]), budget=4)
    assert [len(unit) for unit in asked] == [10, 10, 10, 10]
    assert importance[39] == 3.0
    _, (asked,) = run(singles(41), 41, lambda unit: 1.0, budget=4)
    assert [len(unit) for unit in asked] == [11, 11, 11, 8]


def test_one_copy_that_is_left_over_is_run_and_a_score_below_zero_or_nan_is_nobodys_best():
    importance, asked = run(singles(16), 16, lambda unit: 2.0 if 8 in unit else -1.0, budget=3)
    assert [len(round) for round in asked] == [2, 1]
    # A quarter each of the block's, times what the one that was run says.
    assert importance.tolist() == [0] * 8 + [2] * 8
    nothing, _ = run(singles(16), 16, lambda unit: -1.0 if len(unit) > 1 else 0.5, budget=4)
    assert nothing.tolist() == [0.5, 0.5, *[0] * 14], "a block that helped the answer says nothing about the scale"
    unknown, _ = run(singles(16), 16, lambda unit: math.nan if 9 in unit else 0.8, budget=2)
    assert unknown[:8].tolist() == [0.1] * 8
    assert unknown[8:].isnan().all()


def test_what_is_not_said_is_one_token_a_unit_and_a_copy_for_each():
    assert units([True, True]) == singles(2)
    assert Search(singles(5), 5).wanted == singles(5)


@pytest.mark.parametrize("gradient", [None, [4.0, 3.0, 2.0, 1.0]])
@pytest.mark.parametrize("budget", [1.0, 2])
def test_every_copy_needs_its_score(budget, gradient):
    search = Search(singles(4), 4, budget, gradient)
    with pytest.raises((ValueError, RuntimeError)):
        search.send([1.0] * (len(search.wanted) + 1))


def test_replacements_are_drawn_anew_for_each_response_position_and_run():
    ids, positions = torch.tensor([4, 5, 6]), torch.tensor([1, 2])
    drawn = (ids, positions, 7), (ids.flip(0), positions, 7), (ids, positions, 8)
    seeds = [replacement_seeds(*given) for given in drawn]
    assert len(torch.cat(seeds).unique()) == 6
    assert torch.equal(replacement_seeds(ids, positions[1:], 7), seeds[0][1:]), "whatever else is drawn"


@given(st.integers(1, 80), st.floats(0.01, 1), st.booleans(), st.integers(0, 5))
def test_no_search_runs_more_copies_than_its_budget_or_leaves_a_token_out(number, budget, with_gradient, seed):
    torch.manual_seed(seed)
    truth = torch.rand(number).tolist()
    gradient = torch.rand(number).tolist() if with_gradient else None
    importance, asked = run(singles(number), number, lambda unit: sum(truth[t] for t in unit), budget, gradient)
    assert sum(map(len, asked)) <= copies_of_budget(budget, number)
    assert len(asked) <= (1 if budget == 1 or with_gradient else 2), "hosts in lock-step count on it"
    assert (importance > 0).all()
    assert importance.max() <= sum(truth)
