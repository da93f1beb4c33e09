"""One row of each data set in verl's columns."""

import pytest

from oar_plugin.math.rows import INSTRUCTION, problem_of, verl_row
from oar_plugin.math.sources import SOURCES
from tests.real_data import GSM8K_TRAIN, read_lines


def row_of(name, raw, split="train"):
    return verl_row(name, SOURCES[name], split, 7, raw)


def test_the_columns_are_verls_and_the_prompt_asks_for_a_box():
    row = row_of("deepmath", {"question": " How many? ", "final_answer": "3", "difficulty": 5.0, "topic": "Sets"})
    assert row == {
        "data_source": "deepmath",
        "prompt": [{"role": "user", "content": f"How many? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7, "split": "train", "difficulty": "5.0", "topic": "Sets"},
    }
    assert "\\boxed{}" in row["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("name", "raw", "ground_truth"),
    [
        ("gsm8k", {"question": "q", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"}, "1024"),
        ("math", {"problem": "q", "solution": r"First $\boxed{1}$, then $\boxed{\frac{3}{4}}$."}, r"\frac{3}{4}"),
        ("math500", {"problem": "q", "answer": r"\left( 3, \frac{\pi}{2} \right)"}, r"\left( 3, \frac{\pi}{2} \right)"),
        ("aime24", {"problem": "q", "answer": "025"}, "025"),
        ("amc23", {"question": "q", "answer": 27.0}, "27.0"),
    ],
)
def test_the_ground_truth_is_read_as_the_data_set_writes_it(name, raw, ground_truth):
    assert row_of(name, raw)["reward_model"]["ground_truth"] == ground_truth


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("gsm8k", {"question": "q", "answer": "no mark"}, "no answer"),
        ("math", {"problem": "q", "solution": "The answer is 5."}, "no answer"),
        ("aime24", {"problem": "q", "answer": None}, "no answer"),
        ("aime24", {"problem": " ", "answer": "1"}, "no question"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(name, raw, reason):
    assert row_of(name, raw) == reason


def test_the_same_problem_is_recognised_in_other_typesetting():
    texts = (r"Find $x$ if $x^2 = 4$.", "find \\(x\\) if \\(x^{2}=4\\)", r"Find $x$ if $x^2 = 9$.")
    one, same, other = (problem_of(row_of("math500", {"problem": text, "answer": "1"})) for text in texts)
    assert one == same != other


@pytest.mark.skipif(not GSM8K_TRAIN.is_file(), reason="no GSM8K rows here")
def test_every_real_gsm8k_row_has_a_number_as_its_answer():
    rows = [row_of("gsm8k", raw) for raw in read_lines(GSM8K_TRAIN)]
    assert rows
    for row in rows:
        float(row["reward_model"]["ground_truth"])
