"""Finding the final answer in a response's text and sorting its tokens into segments."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oar_plugin.credit import answer
from oar_plugin.credit.answer import AnswerSpan, SearchFailed, Segment, make_finder, segment_tokens

NAMES = ("boxed", "hash", "answer_tag", "the_answer_is")
FINDERS = {names: make_finder(names) for names in [*((name,) for name in NAMES), NAMES, ()]}
LETTERS = {"R": Segment.REASONING, "C": Segment.CONCLUDE, "A": Segment.ANSWER, "F": Segment.AFTER, "O": Segment.OUTSIDE}
OWN = f"python:{__name__}:users_own"


def users_own(text):
    """A user's finder: for some texts it returns an answer, for some nonsense, and on others it raises."""
    return {
        "pair <5>": (5, 8),
        "triple 5": [np.int64(0), np.int64(7), np.int64(8)],
        r"empty \boxed{5}": (1, 1),
        "nonsense": "nonsense",
        "four": (0, 1, 2, 3),
        "far": (0, 4),
        "backward": (3, 1, 2),
    }[text]


LONG = 600 * "not so "
# Texts for patterns, with «marker|answer» marked where there is an answer.
MARKED = [
    (["boxed"], r"«\boxed{|" + 1000 * "{" + "5" + 1000 * "}" + "»}"),
    (["the_answer_is"], f"The answer is {LONG}«the answer is |5»."),
    *((["the_answer_is"], f"The answer is {LONG}{end}") for end in ("", ".")),
    ([r"regex:=> (\d+)"], "x «=> |5» !"),
    ([r"regex:(=)> (?P<answer>\d+)"], "x «=> |5» !"),
    ([r"regex:=> (\d+)?"], "x => ?"),
    *(([OWN], text) for text in ("pair «|<5>»", "«triple |5»")),
    ([OWN, "boxed"], r"empty «\boxed{|5»}"),
    *(([], text) for text in ("so 4«|2» \n", " \n")),
]
for patterns, kinds in json.loads(Path(__file__).with_name("cases.json").read_text("utf-8")).items():
    MARKED += [(patterns.split(), text) for texts in kinds.values() for text in texts]


@pytest.mark.parametrize(("patterns", "marked"), MARKED)
def test_the_last_answer_is_found_with_what_announces_it(patterns, marked):
    span = make_finder(patterns)(re.sub("[«|»]", "", marked))
    places = [marked.find(mark) - before for before, mark in enumerate("«|»")]
    assert span == (AnswerSpan(*places) if "«" in marked else None)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("box", "allowed are boxed, hash, answer_tag, the_answer_is, regex"),
        ("regex:(", "not a regular expression"),
        ("regex:abc", "needs a group"),
        # `regex` would understand these as an approximate match or as a class of characters.
        (r"regex:\text{s}(\d)", r"'{s}\(\\\\d\)' has another meaning here; allowed: \\{"),
        ("regex:(a{e<=1})", "another meaning"),
        (r"regex:\\{ 2i+1s<3}(a)", "another meaning"),
        ("regex:([[:alpha:]]+)", r"another meaning here; allowed: \\\["),
        ("regex:([[:script=Greek:]]+)", r"another meaning here; allowed: \\\["),
        ("python:no_such_module:f", "cannot be imported"),
        ("python:math:no_such_function", "cannot be imported"),
        ("python:math", "allowed: python:<module>:<function>"),
        ("python:math:pi", "not callable"),
    ],
)
def test_a_bad_pattern_is_named(pattern, reason):
    with pytest.raises(ValueError, match=f"{re.escape(repr(pattern))}.*{reason}"):
        make_finder(["boxed", pattern])
    with pytest.raises(ValueError, match="list of strings"):
        make_finder(pattern)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("anything else", "raised KeyError"),
        (r"fails \boxed{5}", "raised KeyError"),
        ("nonsense", "returned no two or three offsets"),
        ("four", "returned no two or three offsets"),
        ("far", "returned no .*: out of order, or outside"),
        ("backward", "returned no .*: out of order, or outside"),
    ],
)
def test_a_faulty_users_function_is_named(text, fault):
    """Even if another pattern matches: the failed one might have matched a later answer."""
    for finder in (make_finder([OWN]), make_finder([OWN, "boxed"]), users_own):
        with pytest.raises(SearchFailed, match=f"users_own {fault}"):
            segment_tokens([text[:2].encode(), text[2:].encode()], finder)
    with pytest.raises(SearchFailed, match=f"answer finder partial {fault}"):  # it has no name of its own
        segment_tokens([text.encode()], functools.partial(users_own))


def test_an_answer_that_the_policy_did_not_write_is_none():
    assert segment_tokens([b"say ", b"5"], lambda text: (4, 5), own=[True, False]) is None


ENDLESS = [  # expressions that backtrack for ever on these texts
    (r"((?:a|aa)+)$", 5000 * "a" + "!"),
    (r"answer(.*answer.*answer.*answer.*)z", 5000 * "answer "),
    (r"(.*?,){25}P(.)", 5000 * "1,"),
]


@pytest.mark.parametrize(("expression", "text"), ENDLESS)
def test_a_users_expression_that_does_not_end_is_ended(expression, text, monkeypatch):
    monkeypatch.setattr(answer, "PATTERN_SECONDS", 0.1)
    finder = make_finder(["boxed", f"regex:{expression}"])
    for _ in range(2):
        with pytest.raises(SearchFailed, match=re.escape(repr(f"regex:{expression}")) + " took too long"):
            finder(r"\boxed{5} " + text)
    assert finder(r"\boxed{5} aa!").start == 7, "the next text is none the worse for it"


@pytest.mark.parametrize("braces", [r"\{e<=1\}", r"{1,2}", "{", r"\\\{s}", "[:a]", r"\[[:a]", "{(s)}"])
def test_other_braces_and_brackets_are_read_as_ever(braces):
    ours, pythons = make_finder([f"regex:(x{braces})"]), re.compile(f"(x{braces})")
    for text in ("x{e<=1}", "xx", "x{", "x\\{s}", "x:", "xa", "x[a", "x{s}"):
        match = pythons.search(text)
        assert ours(text) == (match and AnswerSpan(match.start(), match.start(), match.end())), text


# ---- tokens

EMOJI = "🙂".encode()
THINKS = [b"think ", b"\\boxed{1}", b" call", b"tool: \\boxed{2}", b" end"]


@pytest.mark.parametrize(
    ("names", "pieces", "own", "expected"),
    [
        # Tokens go by overlap.
        (NAMES, [b"So", b" \\", b"boxed", b"{", b"4", b"2", b"}.", b" Bye"], None, "RCCCAAFF"),
        (NAMES, [b"So \\boxed", b"{4", b"2}.", b" Bye"], None, "CAAF"),
        # No answer.
        (NAMES, [b"no", b" idea"], None, None),
        (NAMES, [b"", b""], None, None),
        # Tokens without bytes go by position and are never the answer.
        (NAMES, [b"", b"So", b"", b"\\boxed{", b"", b"4", b"", b"2", b"", b"}", b""], None, "RRRCCACAFFF"),
        # All tokens of a character of the answer are ANSWER.
        (NAMES, ["因\\boxed{".encode(), EMOJI[:1], EMOJI[1:3], EMOJI[3:] + b"}", b"\xe5"], None, "CAAAF"),
        # Invalid UTF-8 does not shift the answer.
        (NAMES, [b"\xff\xfe", b"\xe4\xb8", b" \\boxed{", b"5", b"\x80", b"}", b"\xf0\x9f"], None, "RRCAAFF"),
        # Tool output is outside, and its answer is not the policy's.
        (NAMES, THINKS, [1, 1, 1, 0, 1], "RAFOF"),
        (NAMES, THINKS[2:], [1, 0, 1], None),
        (NAMES, [b"so", b" 4", b" tool"], [1, 1, 0], None),
        # The last turn with an answer counts, and nothing is matched across turns; a remark says nothing new.
        (NAMES, [b"\\boxed{3}", b"8", b"the answer is ", b"8"], [1, 0, 1, 1], "ROCA"),
        (NAMES, [b"\\boxed{3}", b"8", b"Answer: ", b"8", b"so 5"], [1, 0, 1, 0, 1], "AOFOF"),
        (NAMES, [b"Here is the answer: ", b"8", b"Thanks"], [1, 0, 1], None),
        (NAMES, [b"\\boxed{3}", b"8", b"the answer is correct"], [1, 0, 1], "AOF"),
        (NAMES, [b"\\boxed{Rome}", b"8", b"the answer is ", b"Paris"], [1, 0, 1, 1], "ROCA"),
        # An answer that runs through tool output keeps only the policy's own tokens.
        (NAMES, [b"\\boxed{", b"1", b"tool", b"2", b"}"], [1, 1, 0, 1, 1], "CAOAF"),
        # Without patterns.
        ((), [b"so", b" 42", b" ", b""], None, "RAFF"),
        ((), [b"so", b" 4", b" tool"], [1, 1, 0], "RAO"),
    ],
)
def test_segments_of_tokens(names, pieces, own, expected):
    segments = segment_tokens(pieces, FINDERS[names], own and np.array(own, dtype=bool))
    assert (segments if segments is None else segments.tolist()) == (expected and [LETTERS[one] for one in expected])


def test_own_must_have_one_value_per_token():
    with pytest.raises(ValueError, match="one value per token"):
        segment_tokens([b"a", b"b"], FINDERS[()], np.array([True]))


# ---- what holds for every text

# Fragments of answers, which reach all branches of the finders.
FRAGMENTS = [
    *("\\boxed", "\\boxed{", "{", "}", "\\{", "\\}", "\\", "\\\\", "####", "#", "<answer>", "</answer>", "$", "**"),
    *("the answer is ", "Answer:", ".", "\n", " ", "5", "3.14", "你", "🙂", "\\(", "\\)"),
]
NEARLY = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@given(st.one_of(st.text(), NEARLY), st.sampled_from(list(FINDERS)))
def test_a_finder_never_raises_and_never_returns_an_empty_answer(text, names):
    span = FINDERS[names](text)
    if span is not None:
        assert 0 <= span.marker_start <= span.start < span.end <= len(text)
        assert text[span.start : span.end] == text[span.start : span.end].strip()
