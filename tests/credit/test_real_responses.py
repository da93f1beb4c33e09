"""On answers of a real model the finder sees what the grader saw, which each row has in `predicted`."""

import re

import pytest

from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from tests.real_data import MATH_RESPONSES, read_lines

pytestmark = pytest.mark.skipif(not MATH_RESPONSES.is_file(), reason="no responses of a real model here")


@pytest.fixture(scope="module")
def rows():
    return read_lines(MATH_RESPONSES)


def normalised(answer):
    """Without spaces: the one thing that the grader's field drops ("12 \\frac{3}{5}"). Nothing else is forgiven."""
    return re.sub(r"\s+", "", answer)


@pytest.mark.parametrize("patterns", [("boxed",), ("boxed", "hash", "answer_tag", "the_answer_is")])
def test_the_answer_is_the_graders(rows, patterns):
    finder = make_finder(patterns)
    boxed = [row for row in rows if "\\boxed" in row["response"]]
    assert boxed
    for row in boxed:
        span = finder(row["response"])
        assert span is not None
        assert normalised(row["response"][span.start : span.end]) == normalised(row["predicted"])


def test_the_answers_tokens_hold_the_answer_and_little_else(rows):
    finder = make_finder(("boxed",))
    for row in rows:
        # Words with the space before them: about what a byte-level tokenizer makes.
        pieces = [piece.encode() for piece in re.findall(r"\s*\w+|\s*\W", row["response"])]
        segments = segment_tokens(pieces, finder)
        answer = b"".join(piece for piece, s in zip(pieces, segments, strict=True) if s == Segment.ANSWER)
        assert normalised(row["predicted"]) in normalised(answer.decode())
        assert len(answer) <= len(row["predicted"].encode()) + 8
        # Not a share of the response: one of them goes on for 9,000 characters of noise behind its box.
        assert (segments == Segment.REASONING).sum() > 20
