"""What of a response is graded."""

import pytest

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import make_finder
from oar_plugin.math.answer import final_answer
from tests.real_data import MATH_RESPONSES, read_lines


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


@pytest.mark.skipif(not MATH_RESPONSES.is_file(), reason="no responses of a real model here")
def test_on_real_responses_it_is_the_answer_that_importance_probes():
    probed = make_finder(OarConfig().answer_patterns)
    responses = [row["response"] for row in read_lines(MATH_RESPONSES)]
    assert responses
    for response in responses:
        span, graded = probed(response), final_answer(response)
        assert (response[span.start : span.end] if span else None) == (graded.text if graded else None)
