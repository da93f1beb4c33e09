"""verl's reward function: paid is an answer that equals the ground truth, and nothing stalls training."""

import logging

import pytest

from oar_plugin.runs import reward
from oar_plugin.runs.reward import compute_score

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
