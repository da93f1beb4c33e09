"""On answers of a real model the finder sees what the grader saw.

The file has one JSON object a line with the model's ``response`` and the answer that a grader ``predicted`` from it.
"""

import json
import os
import re
from pathlib import Path

import pytest

from oar_plugin.credit.answer import Segment, make_finder, segment_tokens

DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "math_responses.jsonl"
RESPONSES = Path(os.environ.get("OAR_RESPONSES", DEFAULT))

pytestmark = pytest.mark.skipif(
    not RESPONSES.is_file(), reason=f"no responses at {RESPONSES.name}: name the file in OAR_RESPONSES"
)

# Responses (line numbers from 0) whose `predicted` field is wrong or ambiguous, with the reason. None is known.
EXCEPTIONS: dict[int, str] = {}


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in RESPONSES.read_text(encoding="utf-8").splitlines()]


def normalised(answer):
    """Without spaces: the one thing that the grader's field drops ("12 \\frac{3}{5}"). Nothing else is forgiven."""
    return re.sub(r"\s+", "", answer)


@pytest.mark.parametrize("patterns", [("boxed",), ("boxed", "hash", "answer_tag", "the_answer_is")])
def test_the_answer_is_the_graders(rows, patterns):
    finder = make_finder(patterns)
    boxed = [i for i, row in enumerate(rows) if "\\boxed" in row["response"]]
    exact, wrong = 0, {}
    for i in boxed:
        text, predicted = rows[i]["response"], rows[i]["predicted"]
        span = finder(text)
        answer = text[span.start : span.end] if span else ""
        exact += answer == predicted
        if normalised(answer) != normalised(predicted):
            wrong[i] = (answer, predicted)
    agree = len(boxed) - len(wrong)
    print(f"{agree} of {len(boxed)} boxed answers agree, {exact} to the letter; {len(rows)} responses")
    assert boxed
    assert {i: pair for i, pair in wrong.items() if i not in EXCEPTIONS} == {}


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
