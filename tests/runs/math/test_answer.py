"""What of a response is graded, and when two answers mean the same."""

import pytest

from oar_plugin.runs.math.answer import FinalAnswer, canonical, compare, final_answer, warm_up


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", (r"\frac{1}{2}", True)),
        (r"so \boxed{5}. The answer is plausible.", ("5", True)),
        (r"so \boxed{5}, or \boxed{6", ("5", True)),
        ("...\n#### 72", ("72", False)),
        ("The answer is 3. No: the answer is 18 dollars.", ("18 dollars", False)),
        # A number that merely stands last is no answer.
        ("We add 3 and 4, which gives 7", None),
    ],
)
def test_the_last_complete_answer_counts_and_a_box_before_everything_else(response, expected):
    assert final_answer(response) == expected


@pytest.mark.parametrize(
    ("truth", "answer", "boxed", "verdict"),
    [
        # Another notation of the same.
        ("1000", "1,000.00", True, True),
        (r"\frac{1}{2}", "0.5", True, True),
        ("5", "x = 5", True, True),
        ("1,2,3", "3, 2, 1", True, True),
        ("18", r"\$18", True, True),
        ("50", r"50\%", True, True),
        (r"50\%", "50", True, True),
        (r"\text{East}", "East", True, True),
        ("x^2-1", "(x-1)(x+1)", True, True),
        # An answer in a sentence is read from it.
        ("18", "18 dollars", False, True),
        # Something else.
        ("1", "1, 2, 3", True, False),
        ("(0,1)", "[0,1]", True, False),
        ("-2", "2", True, False),
        ("2", r"5 \text{ or } 2", True, False),
        (r"\text{Monday}", "Tuesday", True, False),
        # No mathematics: such an answer cannot be read, such a ground truth is compared as text.
        ("7", "(((", False, None),
        (r"\frac{", "7", True, False),
    ],
)
def test_what_is_equal(truth, answer, boxed, verdict):
    warm_up()  # else math-verify warns that it has no time limits
    assert compare(truth, FinalAnswer(answer, boxed)) is verdict


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (1, ("5", "x=5", "5.0", "5.00", "x = y = 5")),
        (1, (r"\frac{1}{2}", "1/2", "0.5", ".5")),
        (1, ("(1, 0.5)", r"\left(1.0,\frac12\right)")),
        (1, (r"\text{East}", r"\text{ East }")),
        (1, ("y = 2x+1", "2x + 1.0")),
        (2, ("x^2+y^2=4", "4")),  # an equation of a curve is not its right side
    ],
)
def test_equal_answers_have_one_name(names, texts):
    warm_up()
    assert len({canonical(FinalAnswer(text, True)) for text in texts}) == names
