"""Estimates against enumeration, against arithmetic by hand, and against data whose spread is known."""

import math

import numpy as np
import pytest

from oar_plugin.runs.evaluate.responses import ProblemSet
from oar_plugin.runs.evaluate.table import _number, estimate, grade, majority


@pytest.mark.parametrize(
    ("answers", "correct", "value"),
    [
        ("aab", (True, True, False), 1.0),
        ("bba", (False, False, True), 0.0),
        ("ab", (True, False), 0.5),  # as many votes
        ("aabbc", (True, True, False, False, False), 0.5),
        ([None, None, "a"], (False, False, True), 1.0),  # no answer, no vote
        ([None, None], (False, False), 0.0),
    ],
)
def test_the_most_frequent_answer_decides(answers, correct, value):
    assert majority(list(answers), correct) == value


def test_right_answers_are_one_vote_whatever_their_notation():
    """A group of their own each, the wrong ones would win."""
    answers = ["1/2", r"\frac{1}{2}", "0.5", r"50\%", "7", "x = 7", "7 cm"]
    metrics, _ = grade(ProblemSet("set", [([], r"\frac12")]), [[rf"\boxed{{{answer}}}" for answer in answers]])
    assert (metrics["avg@7"].tolist(), metrics["maj@7"].tolist()) == ([4 / 7], [1.0])


def test_a_paired_difference_is_the_one_by_hand():
    """Differences 0.5, 0, 0, 0.5: mean 0.25, sd sqrt(1/12), se that / 2; t at 97.5 % of three degrees of freedom: 3.18245."""
    method, baseline = np.array([[1.0, 0.5, 0.0, 1.0]]), np.array([[0.5, 0.5, 0.0, 0.5]])
    se = math.sqrt(1 / 12) / 2
    expected = (0.25, se, 0.25 - 3.18245 * se, 0.25 + 3.18245 * se)
    assert estimate([method], [baseline]) == pytest.approx(expected, rel=1e-5)
    apart = estimate([method + 9], [baseline])
    assert apart[1] == pytest.approx(se), "what all problems share adds nothing to the uncertainty"
    assert _number(apart, "+").startswith("**")
    assert not _number((0.5, 0.0, 0.5, 0.5), "+").startswith("**"), "an error of zero is no certainty"


def test_data_sets_count_the_same_whatever_their_size():
    small, large = np.array([[0.0, 1.0]]), np.full((1, 100), 0.25)
    # The error of the small set is 0.5, of the large one 0.
    assert estimate([small, large])[:2] == pytest.approx((0.375, 0.5 / 2))


def drawn(rng, seeds, problems, of_seed, of_problem, of_response):
    shared = rng.normal(0, of_problem, problems)
    noise = rng.normal(0, of_response, (seeds, problems))
    return rng.normal(0, of_seed, (seeds, 1)) + shared + noise


@pytest.mark.parametrize(("of_seed", "of_problem"), [(0.0, 0.3), (0.1, 0.3), (0.1, 0.0)])
def test_the_squared_standard_error_is_the_variance_of_the_mean_over_problems_responses_and_seeds(of_seed, of_problem):
    rng = np.random.default_rng(0)
    means, errors, *_ = np.transpose([estimate([drawn(rng, 3, 40, of_seed, of_problem, 0.2)]) for _ in range(2000)])
    expected = of_seed**2 / 3 + of_problem**2 / 40 + 0.2**2 / 120
    assert np.var(means) == pytest.approx(expected, rel=0.1)
    # What seeds add is cut at 0 from below, which makes it a little large where they add nothing.
    assert np.mean(errors**2) == pytest.approx(expected, rel=0.2 if of_seed == 0 else 0.1)


def test_seeds_of_both_methods_are_in_the_difference_and_one_seed_has_no_such_part():
    rng = np.random.default_rng(1)
    apart, alike = drawn(rng, 3, 30, 0.5, 0.1, 0.1), drawn(rng, 3, 30, 0.0, 0.1, 0.1)
    for one, other in ((apart, alike), (alike, apart)):
        assert estimate([one], [other])[1] > 0.2 > estimate([one[:1]], [other[:1]])[1]


@pytest.mark.parametrize(
    ("problems", "seeds", "of_seed"), [(30, 1, 0.0), (30, 3, 0.02), (300, 1, 0.0), (300, 3, 0.0), (300, 3, 0.02)]
)
def test_about_as_many_intervals_hold_the_true_difference_as_they_say(problems, seeds, of_seed):
    """Of two equally good methods with 32 responses a problem."""
    rng = np.random.default_rng(0)

    def runs(chance):
        own = chance + rng.normal(0, of_seed, (seeds, 1)) + rng.normal(0, 0.03, (seeds, problems))
        return rng.binomial(32, own.clip(0, 1)) / 32

    held = []
    for _ in range(250):
        chance = 0.2 + 0.6 * rng.beta(1.5, 1.5, problems)
        _, _, low, high = estimate([runs(chance)], [runs(chance)])
        held.append(low <= 0 <= high)
    assert 0.90 <= np.mean(held) <= 0.99
