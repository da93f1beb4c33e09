"""What holds for every text, every way to cut it into tokens and every answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oar_plugin.credit.answer import Segment, make_finder, segment_tokens

NAMES = ("boxed", "hash", "answer_tag", "the_answer_is")
FINDERS = {names: make_finder(names) for names in [*((name,) for name in NAMES), NAMES, ()]}

# Filler without anything a marker or a sentence end is made of, but with characters of one to four bytes.
FILLER = st.text(alphabet="abc xyz019+=,é你好🙂👩‍👧\t", max_size=40)
ANSWERS = st.text(alphabet="019abxé五🙂", min_size=1, max_size=8)
# What stands before the answer, the answer itself, and what stands behind it.
FRAMES = [
    ("\\boxed{", "{}", "}"),
    ("$\\boxed{", "\\text{{{}}}", "}$."),
    ("#### ", "{}", "\n"),
    ("<answer>", "{}", "</answer>"),
    ("<answer>\\boxed{", "{}", "}</answer>"),
    ("; the answer is ", "{}", ".\n"),
    ("; **Answer:** ", "{}", "\n"),
]
# Text that is nearly an answer, so that all branches of the finders are reached.
FRAGMENTS = [
    *("\\boxed", "\\boxed{", "{", "}", "\\{", "\\}", "\\", "\\\\", "####", "#", "<answer>", "</answer>", "$", "**"),
    *("the answer is ", "Answer:", ".", "\n", " ", "5", "3.14", "你", "🙂", "\\(", "\\)"),
]
NEARLY = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@st.composite
def cut(draw, data):
    """The bytes in tokens of random length, some of them empty."""
    borders = sorted(draw(st.lists(st.integers(0, len(data)), max_size=30)))
    return [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]


@st.composite
def planted(draw):
    """The bytes of a text with one answer, as before and opening, answer, closing and rest."""
    opening, answer, closing = draw(st.sampled_from(FRAMES))
    answer = answer.format(draw(ANSWERS))
    return [part.encode() for part in (draw(FILLER) + opening, answer, closing + draw(FILLER))]


@st.composite
def planted_in_noise(draw):
    """Behind bytes that are not UTF-8."""
    noise = draw(st.binary(max_size=30)).replace(b"\\", b"")
    return [noise + b"\\boxed{", draw(ANSWERS).encode(), b"}"]


@pytest.mark.parametrize(("texts", "names"), [(planted(), NAMES), (planted_in_noise(), ("boxed",))])
@given(data=st.data())
def test_the_answers_bytes_are_answer_tokens_however_the_text_is_cut(data, texts, names):
    before, answer, rest = data.draw(texts)
    pieces = data.draw(cut(before + answer + rest))
    result = segment_tokens(pieces, FINDERS[names])
    per_byte = np.repeat(result, [len(piece) for piece in pieces])
    assert (per_byte[len(before) : len(before) + len(answer)] == Segment.ANSWER).all()
    if names == NAMES:
        ends = np.cumsum([len(piece) for piece in pieces])
        for piece, end, segment in zip(pieces, ends, result, strict=True):
            overlaps = bool(piece) and end > len(before) and end - len(piece) < len(before) + len(answer)
            assert (segment == Segment.ANSWER) == overlaps


@given(st.data(), st.one_of(NEARLY.map(str.encode), st.binary(max_size=60)), st.sampled_from(list(FINDERS)))
@settings(max_examples=200)
def test_any_bytes_give_segments_in_order_or_none(data, text, names):
    pieces = data.draw(cut(text))
    result = segment_tokens(pieces, FINDERS[names])
    if result is None:
        return
    assert result.dtype == np.int8
    assert result.shape == (len(pieces),)
    shown = result[[bool(piece) for piece in pieces]]
    assert (np.diff(shown) >= 0).all()
    assert (shown == Segment.ANSWER).any()
    assert not (result == Segment.OUTSIDE).any()
    before_the_answer = result[: int(np.argmax(result == Segment.ANSWER))]
    assert set(before_the_answer.tolist()) <= {Segment.REASONING, Segment.CONCLUDE}


@given(st.data(), NEARLY)
def test_tokens_of_others_are_outside_and_nothing_else_is(data, text):
    pieces = data.draw(cut(text.encode()))
    own = np.array(data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces))), dtype=bool)
    result = segment_tokens(pieces, FINDERS[NAMES], own)
    if result is not None:
        assert ((result == Segment.OUTSIDE) == ~own).all()


@given(st.one_of(st.text(), NEARLY), st.sampled_from(list(FINDERS)))
def test_a_finder_never_raises_and_never_returns_an_empty_answer(text, names):
    span = FINDERS[names](text)
    if span is not None:
        assert 0 <= span.marker_start <= span.start < span.end <= len(text)
        answer = text[span.start : span.end]
        assert answer == answer.strip()


BALANCED = st.recursive(
    st.sampled_from(["x", "1", " ", "\\{", "\\}", "\\\\", "\\frac"]),
    lambda inner: st.lists(inner, max_size=4).map(lambda parts: "{" + "".join(parts) + "}"),
    max_leaves=12,
)


@given(st.lists(BALANCED, min_size=1, max_size=4).map("".join).filter(str.strip), FILLER)
def test_a_box_holds_any_balanced_content(content, before):
    text = before + "\\boxed{" + content + "}} tail"
    span = FINDERS[("boxed",)](text)
    assert span is not None
    assert text[span.start : span.end] == content.strip()


@pytest.mark.parametrize("depth", [1, 10, 1000])
def test_braces_may_nest_deeply(depth):
    content = "{" * depth + "5" + "}" * depth
    span = FINDERS[("boxed",)](f"\\boxed{{{content}}}")
    assert (span.start, span.end) == (7, 7 + len(content))
