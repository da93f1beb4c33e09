"""The task, its tutor, its data and its reward."""

import random
import subprocess
import sys

import pytest

from oar_plugin.credit.answer import make_finder
from recipes.cpu_demo.reward import compute_score
from recipes.cpu_demo.task import DATA_SOURCE, STEPS, WORDS, Problem, Tutor, is_right, parse_answer, problems, result

PROBLEM = Problem(((3, "+", 4), (9, "-", 2), (0, "-", 6), (8, "+", 8)))


def test_results_are_taken_modulo_ten():
    assert PROBLEM.prompt == "3 + 4 ; 9 - 2 ; 0 - 6 ; 8 + 8 = ?"
    assert PROBLEM.answer == "7 7 4 6"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so 3 + 4 = 7 ; #### 7 7 4 6", "7 7 4 6"),
        ("#### 1 1 1 1 then #### 7 7 4 6\nand more", "7 7 4 6"),
        ("####   7  7 4 6  ", "7 7 4 6"),
        ("7 7 4 6", None),
        ("####", ""),
    ],
)
def test_the_answer_is_what_stands_behind_the_last_marker_on_its_line(response, answer):
    assert parse_answer(response) == answer


def test_the_plugin_finds_the_same_answer():
    text = Tutor().demonstration(PROBLEM, random.Random(0))
    span = make_finder(("hash",))(text)
    assert span is not None
    assert text[span.start : span.end] == parse_answer(text)


@pytest.mark.parametrize(("response", "score"), [("#### 7 7 4 6<|im_end|>", 1.0), ("#### 7 7 4 5", 0.0), ("", 0.0)])
def test_the_reward_is_one_for_the_right_answer_only(response, score):
    assert compute_score(DATA_SOURCE, response, PROBLEM.answer, extra_info={}, anything=1) == {
        "score": score,
        "acc": score,
    }


def test_a_demonstration_has_the_form_that_the_module_promises():
    words = Tutor().demonstration(PROBLEM, random.Random(1)).split()
    assert 4 * (6 + 6) + 5 <= len(words) <= 4 * (9 + 6) + 5
    assert words[-5] == "####"
    assert [words[i + 1] for i, word in enumerate(words) if word == "="] == words[-4:]


def test_the_tutor_is_right_as_often_as_the_module_says():
    rng, tutor = random.Random(2), Tutor()
    assert len(tutor.misremembered) == 40
    texts = [(p, tutor.demonstration(p, rng)) for p in problems(5, 2000)]
    share = sum(is_right(text, problem.answer) for problem, text in texts) / len(texts)
    assert 0.33 < share < 0.42


def test_problems_are_different_and_leave_out_the_excluded():
    held_out = problems(1, 50)
    more = problems(1, 50, exclude=frozenset(held_out))
    assert len({*held_out, *more}) == 100
    assert problems(1, 50) == held_out


def test_no_filler_word_looks_like_a_part_of_a_sum():
    assert not {*WORDS} & {*"0123456789+-=;#?"}
    assert len(set(WORDS)) == 16
    assert STEPS == 4
    assert result((2, "-", 5)) == 7


def test_verl_gets_the_columns_it_reads(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    from recipes.cpu_demo.data import held_out, write_data

    validation = held_out(8)
    train_file, validation_file = write_data(tmp_path, 0, 20, validation)
    train, val = pq.read_table(train_file).to_pylist(), pq.read_table(validation_file).to_pylist()
    assert (len(train), len(val)) == (20, 8)
    assert set(train[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert val[0]["prompt"] == [{"role": "user", "content": validation[0].prompt}]
    assert val[0]["reward_model"]["ground_truth"] == validation[0].answer
    prompts = {row["prompt"][0]["content"] for row in train}
    assert not prompts & {row["prompt"][0]["content"] for row in val}


def test_the_reward_needs_no_heavy_import():
    code = (
        "import sys, recipes.cpu_demo.reward; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
