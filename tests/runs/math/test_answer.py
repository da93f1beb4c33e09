"""What of a response is graded, and when two answers mean the same. The cases are in cases.json."""

import json
from pathlib import Path

import pytest

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import make_finder, parts_of
from oar_plugin.runs.math.answer import canonical, compare, final_answer, warm_up

CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def quiet():
    warm_up()  # else math-verify warns that it has no time limits


@pytest.mark.parametrize(("response", "expected"), CASES["final"])
def test_reward_and_credit_read_the_same_answer(response, expected):
    span = make_finder(OarConfig().answer_patterns)(response)
    read = span and ", ".join(dict.fromkeys(parts_of(response, span)))
    assert final_answer(response) == expected == read


def test_the_truth_says_whether_a_letter_or_a_box_is_the_answer():
    response = "\\boxed{x^2}\n**Answer: C**"
    assert [final_answer(response, truths) for truths in ((), ["C"], ["(C)"], ["x^2"])] == ["C", "C", "C", "x^2"]
    assert final_answer(r"\boxed{72.5} or \boxed{\frac{145}{2}}", ["72.5"]) == r"\frac{145}{2}", "two notations"
    assert final_answer(["so \\boxed{3}", "the answer is 8", "Done."]) == "8", "the last turn that has any"


@pytest.mark.parametrize(
    ("truth", "answer", "verdict"),
    [(*case, kind.startswith("equal")) for kind in CASES["kinds"] for case in CASES[kind]],
)
def test_what_is_equal(truth, answer, verdict):
    assert bool(compare(truth, answer)) is verdict


def test_what_cannot_be_parsed_is_said():
    assert compare("7", "(((") is None
    assert compare(r"\frac{", "7") is False


@pytest.mark.parametrize(("names", "texts"), CASES["canonical"])
def test_equal_answers_have_one_name(names, texts):
    assert len({canonical(text) for text in texts}) == names
