"""Estimates against enumeration, against arithmetic by hand, and against data whose spread is known."""

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from oar_plugin.runs.evaluate import table
from oar_plugin.runs.evaluate.table import majority


class Estimate(NamedTuple):
    mean: float
    se: float
    low: float
    high: float


def estimate(*values):
    return Estimate(*table.estimate(*values))


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


def test_a_paired_difference_is_the_one_by_hand():
    """Differences 0.5, 0, 0, 0.5: mean 0.25, sd sqrt(1/12), se that / 2; t at 97.5 % of three degrees of freedom: 3.18245."""
    method, baseline = np.array([[1.0, 0.5, 0.0, 1.0]]), np.array([[0.5, 0.5, 0.0, 0.5]])
    found = estimate([method], [baseline])
    se = math.sqrt(1 / 12) / 2
    assert (found.mean, found.se) == pytest.approx((0.25, se))
    assert (found.low, found.high) == pytest.approx((0.25 - 3.18245 * se, 0.25 + 3.18245 * se), rel=1e-5)
    apart = estimate([method + 9], [baseline])
    assert apart.se == pytest.approx(se), "what all problems share adds nothing to the uncertainty"


@pytest.mark.parametrize(
    ("value", "bold"),
    [
        ((0.25, 0.1, 0.1, 0.4), True),
        ((-0.25, 0.1, -0.4, -0.1), True),
        ((0.1, 0.1, -0.1, 0.3), False),
        ((0.5, 0, 0.5, 0.5), False),
    ],
)
def test_a_difference_is_bold_if_its_interval_excludes_zero_but_an_error_of_zero_is_no_certainty(value, bold):
    assert table._number(value, "+").startswith("**") == bold


def test_data_sets_count_the_same_whatever_their_size():
    small, large = np.array([[0.0, 1.0]]), np.full((1, 100), 0.25)
    found = estimate([small, large])
    # The error of the small set is 0.5, of the large one 0.
    assert (found.mean, found.se) == pytest.approx((0.375, 0.5 / 2))


def drawn(rng, seeds, problems, of_seed, of_problem, of_response):
    shared = rng.normal(0, of_problem, problems)
    noise = rng.normal(0, of_response, (seeds, problems))
    return rng.normal(0, of_seed, (seeds, 1)) + shared + noise


@pytest.mark.parametrize(("of_seed", "of_problem"), [(0.0, 0.3), (0.1, 0.3), (0.1, 0.0)])
def test_the_squared_standard_error_is_the_variance_of_the_mean_over_problems_responses_and_seeds(of_seed, of_problem):
    rng = np.random.default_rng(0)
    found = [estimate([drawn(rng, 3, 40, of_seed, of_problem, 0.2)]) for _ in range(2000)]
    expected = of_seed**2 / 3 + of_problem**2 / 40 + 0.2**2 / 120
    assert np.var([each.mean for each in found]) == pytest.approx(expected, rel=0.1)
    # What seeds add is cut at 0 from below, which makes it a little large where they add nothing.
    assert np.mean([each.se**2 for each in found]) == pytest.approx(expected, rel=0.2 if of_seed == 0 else 0.1)


def test_seeds_of_both_methods_are_in_the_difference_and_one_seed_has_no_such_part():
    rng = np.random.default_rng(1)
    apart, alike = drawn(rng, 3, 30, 0.5, 0.1, 0.1), drawn(rng, 3, 30, 0.0, 0.1, 0.1)
    for one, other in ((apart, alike), (alike, apart)):
        assert estimate([one], [other]).se > 0.2 > estimate([one[:1]], [other[:1]]).se


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
        found = estimate([runs(chance)], [runs(chance)])
        held.append(found.low <= 0 <= found.high)
    assert 0.90 <= np.mean(held) <= 0.99


def most(problems, samples):
    """docs/evaluation.md: errors in points of one checkpoint, and of two that are equally good at each problem."""
    return 50 / math.sqrt(problems), 100 / math.sqrt(2 * samples * problems)


def test_the_table_of_errors_in_the_documents_follows_from_its_formulas():
    text = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    rows = re.findall(r"^\| ([\w ,]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    sizes = {name.split(",")[0]: int(problems) for name, problems, *_ in rows}
    five = [sizes[name] for name in ("math500", "aime24", "amc23", "minerva", "olympiadbench")]
    for name, problems, *shown in rows:
        errors = most(int(problems), 32)
        if name.startswith("average"):
            assert int(problems) == sum(five)
            errors = np.linalg.norm([most(each, 32) for each in five], axis=0) / 5
        assert shown == [f"{error:.1f}" for error in errors], name
    assert len(rows) == 7


def test_the_errors_of_checkpoints_that_solve_half_of_all_responses_are_these_bounds():
    rng = np.random.default_rng(0)
    one, other = ((rng.random((2000, 8)) < 0.5).mean(axis=1)[None] for _ in range(2))
    alike = estimate([np.repeat([[0.0, 1.0]], 1000, axis=0).reshape(1, -1)])
    assert 100 * alike.se == pytest.approx(most(2000, 8)[0], rel=0.01)
    assert 100 * estimate([one], [other]).se == pytest.approx(most(2000, 8)[1], rel=0.05)
