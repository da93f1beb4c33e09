"""When two answers mean the same."""

import pytest

from oar_plugin.math.answer import FinalAnswer
from oar_plugin.math.equality import Verdict, compare, is_expression, warm_up


@pytest.fixture(scope="module", autouse=True)
def loaded():
    warm_up()


@pytest.mark.parametrize(
    ("truth", "answer", "boxed", "verdict"),
    [
        # Another notation of the same.
        ("1000", "1,000.00", True, Verdict.EQUAL),
        (r"\frac{1}{2}", "0.5", True, Verdict.EQUAL),
        ("5", "x = 5", True, Verdict.EQUAL),
        ("1,2,3", "3, 2, 1", True, Verdict.EQUAL),
        ("18", r"\$18", True, Verdict.EQUAL),
        ("50", r"50\%", True, Verdict.EQUAL),
        (r"50\%", "50", True, Verdict.EQUAL),
        (r"\text{East}", "East", True, Verdict.EQUAL),
        ("x^2-1", "(x-1)(x+1)", True, Verdict.EQUAL),
        # An answer in a sentence is read from it.
        ("18", "18 dollars", False, Verdict.EQUAL),
        # Something else.
        ("1", "1, 2, 3", True, Verdict.DIFFERENT),
        ("(0,1)", "[0,1]", True, Verdict.DIFFERENT),
        ("-2", "2", True, Verdict.DIFFERENT),
        ("2", r"5 \text{ or } 2", True, Verdict.DIFFERENT),
        (r"\text{Monday}", "Tuesday", True, Verdict.DIFFERENT),
        # No mathematics.
        ("7", "(((", False, Verdict.UNPARSED),
    ],
)
def test_what_is_equal(truth, answer, boxed, verdict):
    assert compare(truth, FinalAnswer(answer, boxed)) is verdict


@pytest.mark.parametrize(
    ("truth", "expected"), [("72", True), (r"\frac{3}{4}", True), (r"50\%", True), (r"\frac{", False)]
)
def test_what_is_an_expression(truth, expected):
    assert is_expression(truth) is expected
