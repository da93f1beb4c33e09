"""Finding the final answer in a response's text and sorting its tokens into segments."""

import logging
import time

import numpy as np
import pytest

from oar_plugin.credit import answer
from oar_plugin.credit.answer import AnswerSpan, Segment, make_finder, segment_tokens

ALL = ("boxed", "hash", "answer_tag", "the_answer_is")
LETTERS = {"R": Segment.REASONING, "C": Segment.CONCLUDE, "A": Segment.ANSWER, "F": Segment.AFTER, "O": Segment.OUTSIDE}


# Text, and what announces the answer and the answer itself in it.
CASES = {
    "boxed": [
        (r"so \boxed{5}.", (r"\boxed{", "5")),
        (r"\boxed{ 5 }", (r"\boxed{ ", "5")),
        (r"\boxed {5}", (r"\boxed {", "5")),
        (r"\boxed{\frac{1}{2}}", (r"\boxed{", r"\frac{1}{2}")),
        (r"\boxed{\{1, 2\}}", (r"\boxed{", r"\{1, 2\}")),
        (r"\boxed{x \} y}", (r"\boxed{", r"x \} y")),
        (r"\boxed{a \\{b} c}", (r"\boxed{", r"a \\{b} c")),
        (r"\\boxed{5}", (r"\boxed{", "5")),
        (r"\boxed{1} or \boxed{2}", (r"\boxed{", "2")),
        (r"\boxed{1} then \boxed{2", (r"\boxed{", "1")),
        (r"\boxed{1} then \boxed{ }", (r"\boxed{", "1")),
        (r"\boxed{ \frac{1 and \boxed{2}", (r"\boxed{", "2")),
        (r"{ } } \boxed{2} }", (r"\boxed{", "2")),
        (r"$\boxed 5$", (r"\boxed ", "5")),
        (r"\boxed -3.5.", (r"\boxed ", "-3.5")),
        (r"\boxed B", (r"\boxed ", "B")),
        (r"\boxed 5^2", None),
        (r"\boxed 5\frac12", None),
        (r"\boxed 3.14x", None),
        (r"write \boxed around it", None),
        (r"\fbox{5}", None),
        (r"\boxedsomething{5}", None),
        (r"\boxed{}", None),
        ("", None),
    ],
    "hash": [
        ("6 * 7 = 42\n#### 42", ("#### ", "42")),
        ("#### 42\nMore text", ("#### ", "42")),
        ("#### $18.", ("#### $", "18")),
        ("#### **18**", ("#### **", "18")),
        (r"#### \$18", ("#### ", r"\$18")),
        ("####42", ("####", "42")),
        ("#### 1\n#### 2", ("#### ", "2")),
        ("#### \nnothing", None),
        ("##### 5", None),
        ("### 5", None),
    ],
    "answer_tag": [
        ("<answer>5</answer>", ("<answer>", "5")),
        ("<answer>\n 5 m\n</answer>", ("<answer>\n ", "5 m")),
        ("<answer>$5$.</answer>", ("<answer>$", "5")),
        ("<answer> was I <answer>5</answer>", ("<answer>", "5")),
        ("<answer>1</answer><answer>2</answer>", ("<answer>", "2")),
        ("<answer>1</answer><answer>2", ("<answer>", "1")),
        ("<answer> </answer>", None),
        ("<answer>5", None),
    ],
    "the_answer_is": [
        ("So the answer is 42.", ("the answer is ", "42")),
        ("THE ANSWER IS 42", ("THE ANSWER IS ", "42")),
        ("The answer is 3.14. Done.", ("The answer is ", "3.14")),
        ("The answer is .5.", ("The answer is ", ".5")),
        ("The answer is $\\frac{1}{2}$. Done", ("The answer is $", r"\frac{1}{2}")),
        ("The answer is: **42**.", ("The answer is: **", "42")),
        ("**The answer is**: 42", ("**The answer is**: ", "42")),
        ("The final answer is \\(x = 5\\).", (r"The final answer is \(", "x = 5")),
        ("Answer: B\nExplanation: it is A.", ("Answer: ", "B")),
        ("**Final Answer:** 5.", ("**Final Answer:** ", "5")),
        ("The answer is:\n\n\\[\n5\n\\]\n", ("The answer is:\n\n\\[\n", "5")),
        ("答案 Answer: 五。然后", ("Answer: ", "五")),
        ("The answer is 1. No, the answer is 2.", ("the answer is ", "2")),
        ("<b>The answer is 5</b> ok", ("The answer is ", "5")),
        (r"\text{The answer is {5}} ok", ("The answer is ", "{5}")),
        ("The answer isn't known", None),
        ("The answer is.", None),
        ("The answer is " + 600 * "not so ", None),
        ("my answers: 5", None),
        ("unanswer: 5", None),
    ],
    # The last answer wins, and markers that touch announce together.
    ALL: [
        (r"<answer>\boxed{5}</answer>", (r"<answer>\boxed{", "5")),
        (r"The answer is $\boxed{5}$.", (r"The answer is $\boxed{", "5")),
        (r"<answer>**Final answer:** \boxed{5}</answer>", (r"<answer>**Final answer:** \boxed{", "5")),
        (r"\boxed{\boxed{5}}", (r"\boxed{\boxed{", "5")),
        (r"\boxed{\text{The answer is } 5}", (r"\boxed{", r"\text{The answer is } 5")),
        ("#### The answer is 5", ("#### The answer is ", "5")),
        (r"The answer is 2 + 3 = \boxed{5}.", (r"\boxed{", "5")),
        (r"\boxed{4}, so the answer is 5.", ("the answer is ", "5")),
        ("the answer is 4.\n#### 5", ("#### ", "5")),
    ],
    r"regex:=> (\d+)": [("x => 5 !", ("=> ", "5"))],
    r"regex:(=)> (?P<answer>\d+)": [("x => 5 !", ("=> ", "5"))],
    r"regex:=> (\d+)?": [("x => ?", None)],
    # A user's function may return pairs or triples, and a faulty one leaves the other patterns alone.
    f"python:{__name__}:users_pair": [("so < 5 >", ("", "< 5 >"))],
    f"python:{__name__}:users_triple": [("abc5", ("abc", "5"))],
    (f"python:{__name__}:users_fault", "boxed"): [(r"\boxed{5}", (r"\boxed{", "5"))],
    (f"python:{__name__}:users_empty", "boxed"): [(r"\boxed{5}", (r"\boxed{", "5"))],
}


@pytest.mark.parametrize(
    ("patterns", "text", "expected"), [(patterns, *case) for patterns, cases in CASES.items() for case in cases]
)
def test_the_last_answer_is_found_with_what_announces_it(patterns, text, expected):
    span = make_finder([patterns] if isinstance(patterns, str) else patterns)(text)
    assert expected == (span and (text[span.marker_start : span.start], text[span.start : span.end]))


def test_without_patterns_the_last_visible_character_is_the_answer():
    finder = make_finder(())
    assert finder("so 42 \n") == AnswerSpan(4, 4, 5)
    assert finder(" \n") is None
    for pieces, own, expected in (
        ([b"so", b" 42", b" ", b""], None, "RAFF"),
        ([b"so", b" 4", b" tool"], np.array([True, True, False]), "RAO"),
    ):
        assert segment_tokens(pieces, finder, own).tolist() == [LETTERS[letter] for letter in expected]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("box", "allowed are boxed, hash, answer_tag, the_answer_is, regex"),
        ("regex:(", "not a regular expression"),
        ("regex:abc", "needs a group"),
        ("python:no_such_module:f", "cannot be imported"),
        ("python:math:no_such_function", "cannot be imported"),
        ("python:math", "allowed: python:<module>:<function>"),
        ("python:math:pi", "not callable"),
    ],
)
def test_a_bad_pattern_is_named(pattern, reason):
    with pytest.raises(ValueError, match=reason) as error:
        make_finder(["boxed", pattern])
    assert repr(pattern) in str(error.value)


def test_a_single_string_is_not_a_list_of_patterns():
    with pytest.raises(ValueError, match="list of strings"):
        make_finder("boxed")


# What a user's module may hold; the names are reached through "python:<this module>:<name>".
def users_pair(text):
    return (text.index("<"), text.index(">") + 1)


def users_triple(text):
    return [np.int64(0), np.int64(3), np.int64(4)]


def users_fault(text):
    raise ZeroDivisionError


def users_nonsense(text):
    return "nonsense"


def users_four(text):
    return (0, 1, 2, 3)


def users_far(text):
    return (0, len(text) + 1)


def users_backward(text):
    return (3, 1, 2)


def users_empty(text):
    return (1, 1)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (users_fault, "raised ZeroDivisionError"),
        (users_nonsense, "returned str"),
        (users_four, "returned tuple"),
        (users_far, "out of order or outside"),
        (users_backward, "out of order or outside"),
    ],
)
def test_a_faulty_users_function_means_no_answer_and_one_warning(function, fault, caplog):
    answer._warn_once.cache_clear()
    finder = make_finder([f"python:{__name__}:{function.__name__}"])
    with caplog.at_level(logging.WARNING):
        assert [finder("abcdef") for _ in range(3)] == [None] * 3
        assert segment_tokens([b"abc", b"def"], function) is None
    assert len(caplog.records) == 1
    assert fault in caplog.text
    assert function.__name__ in caplog.text


EMOJI = "🙂".encode()
THINKS = [b"think ", b"\\boxed{1}", b" call", b"tool: \\boxed{2}", b" end"]


@pytest.mark.parametrize(
    ("pieces", "own", "expected"),
    [
        # Tokens go by overlap.
        ([b"So", b" \\", b"boxed", b"{", b"4", b"2", b"}.", b" Bye"], None, "RCCCAAFF"),
        ([b"So \\boxed", b"{4", b"2}.", b" Bye"], None, "CAAF"),
        ([b"So \\boxed{42}. Bye"], None, "A"),
        # No answer.
        ([b"no", b" idea"], None, None),
        ([], None, None),
        ([b"", b""], None, None),
        # Tokens without bytes go by position and are never the answer.
        ([b"", b"So", b"", b"\\boxed{", b"", b"4", b"", b"2", b"", b"}", b""], None, "RRRCCACAFFF"),
        # A character of the answer that is split over tokens belongs to it wholly.
        (["因\\boxed{".encode(), EMOJI[:1], EMOJI[1:3], EMOJI[3:] + b"}", b"\xe5"], None, "CAAAF"),
        # Invalid UTF-8 does not shift the answer.
        ([b"\xff\xfe", b"\xe4\xb8", b" \\boxed{", b"5", b"\x80", b"}", b"\xf0\x9f"], None, "RRCAAFF"),
        # Tool output is outside, and its answer is not the policy's.
        (THINKS, [1, 1, 1, 0, 1], "RAFOF"),
        (THINKS[2:], [1, 0, 1], None),
        ([b"so", b" 4", b" tool"], [1, 1, 0], None),
        # An answer that runs through tool output keeps only the policy's own tokens.
        ([b"\\boxed{", b"1", b"tool", b"2", b"}"], [1, 1, 0, 1, 1], "CAOAF"),
    ],
)
def test_segments_of_tokens(pieces, own, expected):
    segments = segment_tokens(pieces, make_finder(ALL), own and np.array(own, dtype=bool))
    if expected is None:
        assert segments is None
    else:
        assert segments.tolist() == [LETTERS[letter] for letter in expected]
        assert segments.dtype == np.int8
        assert segments.shape == (len(pieces),)


def test_own_must_have_one_value_per_token():
    with pytest.raises(ValueError, match="one value per token"):
        segment_tokens([b"a", b"b"], make_finder(()), np.array([True]))


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 20_000,
        r"\boxed{1} " * 20_000,
        "the answer is the answer is " * 10_000,
        "the answer is 5, so " * 10_000,
        "<answer>" * 20_000,
        "the " * 30_000,
        "#### " * 20_000,
        "answer" + " " * 100_000,
        "\\" * 100_000,
        "$ " * 50_000,
    ],
)
def test_endless_repetition_is_searched_in_linear_time(text):
    start = time.perf_counter()
    make_finder(ALL)(text)
    assert time.perf_counter() - start < 3  # far above linear time on a busy machine, far below quadratic


def test_a_batch_takes_milliseconds():
    pieces = [b" word"] * 505 + [b"\\", b"boxed", b"{", b"4", b"2", b"}.", b""]
    finder, start = make_finder(ALL), time.perf_counter()
    for _ in range(64):
        segment_tokens(pieces, finder)
    assert time.perf_counter() - start < 1  # generous: the machine may be busy
