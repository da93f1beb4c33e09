"""verl's reward function: paid is an answer that equals the ground truth, and nothing stalls training."""

import logging

import pytest

from oar_plugin.runs import reward
from oar_plugin.runs.reward import compute_score
from tests.real_data import MATH_RESPONSES, read_lines

# Ground truths that the file's grader did not recognise in another notation (10000).
GRADER_IS_WRONG = {"10{,}000"}
KEYS = {"score", "acc", "no_answer", "unparsed", "failed"}


@pytest.fixture(scope="module", autouse=True)
def one_pool():
    compute_score("test", r"\boxed{2 + 2}", "4", timeout_s=5.0, processes=1)
    yield
    reward._pool.close()
    reward._pool = None


@pytest.mark.parametrize(
    ("response", "truth", "flags"),
    [
        (r"\boxed{72}", "72", {"score", "acc"}),
        (r"\boxed{7 2}", 72, {"score", "acc"}),
        (r"\boxed{\frac{144}{2}}", "72", {"score", "acc"}),
        ("#### 72", "72", {"score", "acc"}),
        (r"\boxed{71}", "72", set()),
        (r"\boxed{72} or rather \boxed{71}", "72", set()),
        ("It is 72", "72", {"no_answer"}),
        (r"\boxed{72", "72", {"no_answer"}),
        ("", "72", {"no_answer"}),
        (r"\boxed{" + "1+" * 400 + "1}", "401", {"unparsed"}),
    ],
)
def test_each_row_has_every_key_and_says_why_it_got_nothing(response, truth, flags):
    assert compute_score("test", response, truth) == {key: float(key in flags) for key in KEYS}


def test_an_answer_that_takes_for_ever_pays_nothing_and_is_flagged(caplog):
    """It comes to an end, and the next one is graded."""
    caplog.set_level(logging.WARNING, logger="oar_plugin")
    row = compute_score("test", r"\boxed{9^{9^{9^{9}}}}", "7")
    assert (row["score"], row["failed"]) == (0.0, 1.0)
    assert "the reward is 0" in caplog.text
    assert compute_score("test", r"\boxed{14/2}", "7")["score"] == 1.0


@pytest.mark.skipif(not MATH_RESPONSES.is_file(), reason="no responses of a real model here")
def test_on_real_responses_it_agrees_with_their_grader():
    rows = read_lines(MATH_RESPONSES)
    assert rows
    for row in rows:
        paid = compute_score("test", row["response"], row["ground_truth"])["score"] == 1.0
        assert paid is row["correct"] or row["ground_truth"] in GRADER_IS_WRONG
