"""When two answers mean the same."""

import pytest

from oar_plugin.math.answer import FinalAnswer
from oar_plugin.math.equality import Verdict, compare, is_expression, warm_up


@pytest.fixture(scope="module", autouse=True)
def loaded():
    warm_up()


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("1000", "1,000.00"),
        (r"\frac{1}{2}", "0.5"),
        ("5", "x = 5"),
        ("1,2,3", "3, 2, 1"),
        ("18", r"\$18"),
        ("50", r"50\%"),
        (r"50\%", "50"),
        (r"\text{East}", "East"),
        ("x^2-1", "(x-1)(x+1)"),
    ],
)
def test_other_notation_of_the_same_is_equal(truth, answer):
    assert compare(truth, FinalAnswer(answer, boxed=True)) is Verdict.EQUAL


@pytest.mark.parametrize(
    ("truth", "answer"),
    [("1", "1, 2, 3"), ("(0,1)", "[0,1]"), ("-2", "2"), ("2", r"5 \text{ or } 2"), (r"\text{Monday}", "Tuesday")],
)
def test_something_else_is_different(truth, answer):
    assert compare(truth, FinalAnswer(answer, boxed=True)) is Verdict.DIFFERENT


def test_an_answer_in_a_sentence_is_read_from_it():
    assert compare("18", FinalAnswer("18 dollars", boxed=False)) is Verdict.EQUAL


def test_an_answer_without_mathematics_is_unparsed():
    assert compare("7", FinalAnswer("(((", boxed=False)) is Verdict.UNPARSED


@pytest.mark.parametrize(
    ("truth", "expected"), [("72", True), (r"\frac{3}{4}", True), (r"50\%", True), (r"\frac{", False)]
)
def test_what_is_an_expression(truth, expected):
    assert is_expression(truth) is expected
