import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.words import EOS, MARK, VALUES, encode, text
from oar_plugin.credit.answer import Segment

names = st.sampled_from(sorted(TASKS))
seeds = st.integers(0, 10**6)


@given(name=names, seed=seeds)
def test_perfect_demonstration_is_right(name, seed):
    task, rng = TASKS[name], random.Random(seed)
    problem = task.problem(rng)
    response = task.demonstration(problem, rng, 0.0)
    reading = task.read(problem, response)
    assert len(problem.prompt) == task.prompt_length
    assert len(response) <= task.max_response_length
    assert len(problem.answer) == task.answer_length
    assert reading.right
    assert reading.ended
    assert reading.length == len(response)


@given(name=names, seed=seeds)
def test_results_stand_in_the_reasoning_one_group_a_step(name, seed):
    task, rng = TASKS[name], random.Random(seed)
    problem = task.problem(rng)
    response = task.demonstration(problem, rng, task.error_rate)
    reading = task.read(problem, response)
    assert sorted(set(reading.step)) == list(range(task.steps))
    for position in reading.causal:
        assert response[position] in VALUES
        assert reading.segments[position] == Segment.REASONING


@given(name=names, seed=seeds)
def test_changing_a_result_of_a_step_and_what_follows_changes_the_answer(name, seed):
    """A wrong step makes a demonstration wrong unless a later error undoes it: then no step differs at the end."""
    task, rng = TASKS[name], random.Random(seed)
    problem = task.problem(rng)
    steps, answer = task.solution(problem, rng, 0.5)
    right_steps, right_answer = task.solution(problem, rng, 0.0)
    if name.startswith("parallel"):
        wrong = any(a.results != b.results for a, b in zip(steps, right_steps, strict=True))
    else:
        wrong = steps[-1].results != right_steps[-1].results
    assert (answer != right_answer) == wrong


@pytest.mark.parametrize("name", TASKS)
def test_error_rate_leaves_a_third_right(name):
    task, rng = TASKS[name], random.Random(1)
    right = 0
    for _ in range(1000):
        problem = task.problem(rng)
        right += task.read(problem, task.demonstration(problem, rng, task.error_rate)).right
    assert 0.3 < right / 1000 < 0.5


def test_errors_propagate_in_a_chain():
    task, rng = TASKS["chain"], random.Random(0)
    problem = task.problem(rng)
    steps, _ = task.solution(problem, rng, 1.0)
    assert [step.copied[0] for step in steps[1:]] == [step.results[0] for step in steps[:-1]]


def test_response_that_never_ends_is_not_right():
    task, rng = TASKS["parallel"], random.Random(0)
    problem = task.problem(rng)
    response = task.demonstration(problem, rng, 0.0)
    assert not task.read(problem, response[:-1]).right
    assert task.read(problem, [*response, EOS, EOS]).length == len(response)
    assert not task.read(problem, [t for t in response if t != MARK]).right


def test_text_reads_like_text():
    assert text(encode(["3", "+", "4", "=", "7", ";", "####", "7", "<eos>"])) == "3 + 4 = 7 ; #### 7"
