"""What a credit marks, and how it agrees with values of places, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.marks import continuation
from benchmarks.marks.study import first_hit, judged
from tests.benchmarks.test_learning import model, rollout  # noqa: F401


def test_a_credit_that_knows_the_wrong_results_ranks_them_first_and_its_negative_last(rollout):  # noqa: F811
    best, worst = ([*judged(sign * rollout.wrong_BL.float(), rollout)] for sign in (1, -1))
    asked = [row for row in best if "wrong AUC" in row]
    assert 0 < len(asked) < len(best)
    for row in asked:
        assert row["wrong AUC"] == 1
        assert row["wrong results, wrong answer, weight"] > row["filler, weight"] == pytest.approx(row["form, weight"])
    assert {row["wrong AUC"] for row in worst if "wrong AUC" in row} == {0.0}
    assert all(row["results AUC"] == 1 for row in judged(rollout.causal_BL.float(), rollout))


def test_the_first_wrong_step_is_hit_where_the_highest_token_stands_in_it():
    """Steps are `x r ;`: of three the second and the third are wrong."""
    result_R, wrong_R = np.array([0, 1, 0, 0, 1, 0, 0, 1, 0], bool), np.array([0, 0, 0, 0, 1, 0, 0, 1, 0], bool)
    hits = [first_hit(np.eye(9)[place], result_R, wrong_R) for place in range(9)]
    assert hits == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert first_hit(np.zeros(9), result_R, wrong_R) == pytest.approx(3 / 9), "all equal: chance"


def test_correlations_by_hand():
    """Values 0.5, 0.625, 0.125, 0.5: advantages 0.125, -0.5, 0.375, drops of rank 1, 3, 2."""
    right_PN = np.array([[n < 16 * value for n in range(16)] for value in (0.5, 0.625, 0.125, 0.5)])
    good = continuation.Continued([0], [0] * 5, True, [0, 1, 2, 3], right_PN)
    scored = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([0.5, 0.5, 2.0])
    found = continuation.agreement("x", good, *scored) | continuation.agreement(
        "x", replace(good, right=False), *scored
    )
    assert found["drop, right"] == found["drop, wrong"] == pytest.approx(1)
    assert found["advantage, right"] == pytest.approx(np.corrcoef([1.5, 1.5, 3], [2, 1, 3])[0, 1])
    assert found["advantage, wrong"] == pytest.approx(np.corrcoef([1.5, 1.5, 3], [2, 3, 1])[0, 1])
    spans = replace(good, places=[0, 2, 3], right_PN=right_PN[:3])  # mean scores 2.5 and 2, drops 0.125 and 0.5
    assert continuation.agreement("x", spans, *scored)["drop, right"] == pytest.approx(-1)
