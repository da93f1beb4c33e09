"""Which tokens of a response are its final answer, which announce the answer, and which are reasoning (arXiv 2601.07408).

Answers are searched in the text and mapped to tokens through byte offsets, because borders of tokens and of answers rarely
coincide (a token can hold ``}.`` or half of a multi-byte character).
"""

import enum
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import regex

from oar_plugin.credit import imported

PATTERN_SECONDS = 2.0  # of a user's regular expression on one text; ordinary expressions take milliseconds


class Segment(enum.IntEnum):
    OUTSIDE = 0  # not the policy's own token: tool output, padding
    REASONING = 1
    CONCLUDE = 2  # the marker that announces the answer
    ANSWER = 3
    AFTER = 4


class SearchFailed(Exception):
    """A user's own pattern failed on a text, so its answer is unknown; the message names the pattern and the failure."""


class AnswerSpan(NamedTuple):
    """The answer ``[start, end)`` in a text, in characters, and from ``marker_start`` what announces it (``#### ``).

    ``0 <= marker_start <= start < end <= len(text)``; neither white space nor decoration surrounds the answer.
    """

    marker_start: int
    start: int
    end: int


# A user's own callable may return an AnswerSpan, (start, end), (marker_start, start, end), or None.
AnswerFinder: TypeAlias = Callable[[str], tuple[int, int] | tuple[int, int, int] | None]

_Candidates: TypeAlias = Callable[[str], Iterable[AnswerSpan]]

# A longer "answer" in running text is an argument, not an answer. Without a limit, a response that repeats "the answer is"
# would take quadratic time.
_LONGEST_SENTENCE = 1000

# `\\boxed` after an escaped backslash still counts, as in reward functions that search for the last "\boxed".
_BRACES = re.compile(r"(?P<open>\\boxed\s*\{|\{)|(?P<close>\})|\\(?!\\boxed).", re.DOTALL)
# LaTeX also boxes a token without braces. Here only a number or a capital letter counts; the rest may be prose about "\boxed".
_BARE_BOX = re.compile(r"\\boxed +(-?\d+(?:[.,/]\d+)*|[A-Z])(?![\w{^/%]|[.,]\d|\\(?![)\]]))")
_HASH = re.compile(r"####(?<!#####)(?!#)([^\n]*)")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
# Two expressions: a single one would begin with optional words and be tried at every character of the text.
_PROSE_MARKER = re.compile(r"(?:[Aa]nswer|ANSWER)\**\s*(?:(?:is|IS)\b[\s*]*:?|:)")
_PROSE_LEAD = re.compile(r"(?:\*\*)?(?<!\w)(?:(?:the|my|our|final|correct)\s+){0,3}\Z", re.IGNORECASE)
_LONGEST_LEAD = 40
# A full stop inside a number or name ("3.14", "x.y") or behind an abbreviation ends no sentence; a tag or a new line does.
_SENTENCE_END: Any = regex.compile(
    r"(?i)\.(?!\w)(?<!\b(?:appr|approx|ca|cf|e\.g|eq|est|i\.e|max|resp|rs|viz|vs|dr|mr|mrs|ms|mt|st)\.)|[?。？！\n]|</\w+>"
)
_LEADING_DECORATION = re.compile(r"(?:[\s$*]|\\[(\[])*")
# What a response says behind its thoughts counts, even if the thoughts have a box.
_END_OF_THOUGHTS = re.compile(r"(?i)(?:[<\[]|◁)/(?:\w+:)?(?:think\w*|thought|reasoning)\s*[>\]▷]|<\|end_of_thought\|>")
# Words behind "####" are an answer ("East") only at the end of a response. With a word of group 1 they always are a heading.
_HEADING = re.compile(
    r"(?i)(?:\(?(?:\d+(?:\.\d+)*|[a-z]|[ivx]+)[.):]?\)?\s+)?(?:((?:step|case|proof|method|approach|verif\w*|(?:double-?)?check\w*)\b"
    r"|(?:(?:final )?answer|conclu\w*|solution|expla\w*|summary|note|reason(?:ing)?|analy\w*)\b(?!.*:.*\d))|[^\W\d_]{2})"
)
_FOLLOWED = re.compile(r"[^\n]*\n\s*[^\s<]")
# A digit, a formula, or a letter that stands alone, as for options.
_MATHEMATICS = re.compile(r"[\d\\$=^<>√∞π∅½¼¾⅐-⅞]|^\(?[A-Za-z]\b(?!\s+\w)")
# What prompts have in the place of an answer, which responses repeat.
_PLACEHOLDER = re.compile(
    r"(?i)(?:\\text\{)?(?:[\s.?_…]*|\\[lc]?dots|\\square|\W*(?:(?:the|your|final)\s)*answer(?:\shere)?\W*)\}?|\{\s*\}|\\"
)
# Expressions that `regex` and `re` understand differently: an approximate match ("{e<=1}"), a named class ("[[:alpha:]]").
_AMBIGUOUS = re.compile(r"(?<!\\)(?:\\\\)*(\{(?=[\d\s<=+]*[isde])|\[(?=:[^\]]*:\]))")


def _trimmed(text: str, marker_start: int, start: int, end: int, decoration: bool = False) -> AnswerSpan | None:
    """``[start, end)`` without white space; with ``decoration``, also without ``$ * \\( \\[`` and full stop; None if empty."""
    while end > start:
        if text[end - 1].isspace():
            end -= 1
        elif decoration and text.endswith((r"\)", r"\]"), start, end):
            end -= 2
        elif decoration and text[end - 1] in "$*." and not text.endswith("\\", start, end - 1):
            end -= 1
        else:
            break
    if decoration and (leading := _LEADING_DECORATION.match(text, start, end)):
        start = leading.end()
    while start < end and text[start].isspace():
        start += 1
    return AnswerSpan(marker_start, start, end) if start < end else None


def _boxed(text: str) -> Iterator[AnswerSpan]:
    """``\\boxed{...}`` with balanced braces, in one pass; boxes that are empty or not closed are skipped."""
    open_braces: list[re.Match[str]] = []
    first_box = text.find(r"\boxed")
    for token in _BRACES.finditer(text, first_box) if first_box >= 0 else ():
        if token.lastgroup == "open":
            open_braces.append(token)
        elif token.lastgroup == "close" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{" and (span := _trimmed(text, opening.start(), opening.end(), token.start())):
                yield span
    for match in _BARE_BOX.finditer(text):
        yield AnswerSpan(match.start(), *match.span(1))


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[AnswerSpan]:
    for match in pattern.finditer(text):
        if span := _trimmed(text, match.start(), *match.span(1), decoration=True):
            yield span


def _the_answer_is(text: str) -> Iterator[AnswerSpan]:
    """``the answer is ...``, ``Final answer: ...`` up to the end of the sentence or of the enclosing brace."""
    for marker in _PROSE_MARKER.finditer(text):
        lead = _PROSE_LEAD.search(text, max(0, marker.start() - _LONGEST_LEAD), marker.start())
        if lead is None:  # the marker is the end of a longer word
            continue
        leading = _LEADING_DECORATION.match(text, marker.end())
        start = leading.end() if leading else marker.end()
        limit = min(len(text), start + _LONGEST_SENTENCE)
        sentence_end = _SENTENCE_END.search(text, start, limit)
        if sentence_end is None and limit < len(text):
            continue
        end, depth = sentence_end.start() if sentence_end else limit, 0
        for brace in _BRACES.finditer(text, start, end):
            depth += (brace.lastgroup == "open") - (brace.lastgroup == "close")
            if depth < 0:  # it was opened before the answer
                end = brace.start()
                break
        if span := _trimmed(text, lead.start(), start, end, decoration=True):
            yield span


def _last_character(text: str) -> AnswerSpan | None:
    """The last character that is not white space, for models without an answer format."""
    end = len(text.rstrip())
    return AnswerSpan(end - 1, end - 1, end) if end else None


_NAMED: dict[str, _Candidates] = {
    "boxed": _boxed,
    "hash": partial(_matches, _HASH),
    "answer_tag": partial(_matches, _ANSWER_TAG),
    "the_answer_is": _the_answer_is,
}


def make_finder(patterns: Sequence[str]) -> Callable[[str], AnswerSpan | None]:
    r"""Returns the function that finds the final answer in a response's text: an ``AnswerSpan``, or None.

    Answers behind the last ``</think>`` that has any count before others; boxes, tags and a user's own matches before announced
    answers (behind a box, ``the answer is 5`` is a remark); announced words after all. Of equal ones the last counts: the ``5``
    of ``<answer>\boxed{5}</answer>``. Empty or open boxes, placeholders (``...``) and Markdown headings (``#### Check``) are no
    answers. Markers without text between them are one marker: ``The answer is \boxed{``. The patterns are:

    - ``boxed``: ``\boxed{...}`` with balanced braces, also ``\boxed 5``;
    - ``hash``: ``#### ...`` to the end of the line;
    - ``answer_tag``: ``<answer>...</answer>``;
    - ``the_answer_is``: ``the (final) answer is ...`` or ``Answer: ...`` to the end of the sentence, also in later prose;
    - ``regex:<expression>``: a Python regular expression. Its group named ``answer``, or else group 1, is the answer; its match
      begins the marker. The ``regex`` library runs it, because it can stop a search (``PATTERN_SECONDS``). For its ``\w`` and
      ``\b``, combining marks are letters, ``²`` and ``½`` are not; its ``\s`` does not match U+001C to U+001F;
    - ``python:<module>:<function>``: a user's own ``AnswerFinder``, without a time limit.

    Without patterns, the answer is the last character that is not white space; only the ``last`` probe makes sense for it.
    The text may have lone surrogates for bytes that are not UTF-8. SearchFailed: a user's own pattern took too long, raised, or
    returned something else. ValueError: a pattern cannot be used; the message says why.
    """
    if isinstance(patterns, str):
        raise ValueError(f"answer patterns must be a list of strings, got the single string {patterns!r}")
    if not patterns:
        return _last_character
    sources = [(pattern, _candidates_of(pattern)) for pattern in patterns]

    def find(text: str) -> AnswerSpan | None:
        found = [(_certainty(pattern, text, span), span) for pattern, source in sources for span in source(text)]
        spans = [span for _, span in found]
        ends = [match.end() for match in _END_OF_THOUGHTS.finditer(text)]
        answers = [(bisect_right(ends, one.start), sure > 0, sure, one.start, one) for sure, one in found if sure >= 0]
        if not answers:
            return None
        answer = max(answers)[-1]
        marker_start = answer.marker_start
        for span in sorted(spans, key=lambda span: span.marker_start, reverse=True):
            # This span's own answer would begin at or inside of our marker, so there is no text between the two markers.
            if span.marker_start < marker_start <= span.start:
                marker_start = span.marker_start
        return answer._replace(marker_start=marker_start)

    return find


def _certainty(pattern: str, text: str, span: AnswerSpan) -> int:
    """How sure a match is an answer. 2: box, tag or user's own; 1: announced; 0: announced, but only words; -1: it is none."""
    if pattern not in _NAMED:
        return 2
    words = text[span.start : span.end]
    boxes = () if pattern == "boxed" else _boxed(words)  # a box in a box is a match of its own, which starts later
    answered = any(not _PLACEHOLDER.fullmatch(words, one.start, one.end) for one in boxes)
    if _PLACEHOLDER.fullmatch(words) or (r"\boxed" in words and not answered):
        return -1
    heading = _HEADING.match(words) if pattern == "hash" else None
    if heading and (heading[1] or (_FOLLOWED.match(text, span.end) and not _MATHEMATICS.search(words, heading.end()))):
        return -1
    return 2 if pattern in ("boxed", "answer_tag") else int(_MATHEMATICS.search(words) is not None)


def _candidates_of(pattern: str) -> _Candidates:
    if pattern in _NAMED:
        return _NAMED[pattern]
    kind, _, value = pattern.partition(":")
    if kind == "regex":
        return _regex_candidates(pattern, value)
    if kind == "python":
        try:
            function = imported(pattern, "allowed: python:<module>:<function>")
        except ValueError as error:
            raise ValueError(f"answer pattern {pattern!r}: {error}") from error
        if not callable(function):
            raise ValueError(f"answer pattern {pattern!r}: it is not callable")
        return lambda text: [span] if (span := _call(function, text)) else []
    raise ValueError(
        f"answer pattern {pattern!r} is unknown; allowed are {', '.join(_NAMED)}, "
        "regex:<expression> and python:<module>:<function>"
    )


def _regex_candidates(pattern: str, expression: str) -> _Candidates:
    if ambiguous := _AMBIGUOUS.search(expression):
        part = expression[ambiguous.start(1) :][:8]
        raise ValueError(f"answer pattern {pattern!r}: {part!r} has another meaning here; allowed: \\{ambiguous[1]}")
    try:
        group = "answer" if "answer" in re.compile(expression).groupindex else 1
        compiled: Any = regex.compile(expression, regex.VERSION0)
    except (re.error, regex.error) as error:
        raise ValueError(f"answer pattern {pattern!r}: not a regular expression: {error}") from error
    if not compiled.groups:
        raise ValueError(f"answer pattern {pattern!r}: needs a group for the answer: (...) or (?P<answer>...)")

    def candidates(text: str) -> Iterator[AnswerSpan]:
        try:
            for match in compiled.finditer(text, timeout=PATTERN_SECONDS):
                if span := _trimmed(text, match.start(), *match.span(group)):
                    yield span
        except (TimeoutError, MemoryError) as error:
            raise SearchFailed(f"answer pattern {pattern!r} took too long, or too much memory") from error

    return candidates


def _call(finder: AnswerFinder, text: str) -> AnswerSpan | None:
    name = getattr(finder, "__qualname__", type(finder).__qualname__)
    try:
        returned = finder(text)
    except SearchFailed:
        raise
    except Exception as error:
        raise SearchFailed(f"answer finder {name} raised {type(error).__name__}") from error
    if returned is None:
        return None
    try:
        *marker, start, end = map(operator.index, returned)
        (marker_start,) = marker or (start,)
        if not 0 <= marker_start <= start <= end <= len(text):
            raise ValueError("out of order, or outside of the text")
    except Exception as error:
        raise SearchFailed(f"answer finder {name} returned no two or three offsets in the text: {error}") from error
    return _trimmed(text, marker_start, start, end)


def segment_tokens(pieces: Sequence[bytes], finder: AnswerFinder, own: np.ndarray | None = None) -> np.ndarray | None:
    """Returns the ``Segment`` of each token of one response, int8 ``[T]``; None if the finder finds no answer of the policy.

    A token is ANSWER if its bytes overlap the answer's, else CONCLUDE if they overlap the marker's. A token without bytes (a
    special token, ``b""`` in ``pieces``) is sorted by its position; inside the answer it is CONCLUDE. ``own``, bool ``[T]``, is
    False where the policy did not write the token (tool output). Such tokens are OUTSIDE, and the finder sees new lines in
    their place, so that a tool's answer never counts as the policy's.

    SearchFailed: the finder raised, or returned something else. ValueError: ``own`` has another length.
    """
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    data = b"".join(pieces)
    if own is not None:
        own = np.asarray(own, dtype=bool)
        if own.shape != lengths.shape:
            raise ValueError(f"own has shape {own.shape}, expected {lengths.shape}: one value per token")
        characters = np.frombuffer(data, dtype=np.uint8).copy()
        characters[~np.repeat(own, lengths)] = ord("\n")
        data = characters.tobytes()

    # surrogateescape makes one character of every byte that is not UTF-8: a prefix of the text encodes to the bytes before it.
    text = data.decode("utf-8", "surrogateescape")
    span = _call(finder, text)
    if span is None:
        return None
    marker_start, answer_start, answer_end = (
        len(text[:offset].encode("utf-8", "surrogateescape")) for offset in (span.marker_start, span.start, span.end)
    )

    segments = np.full(len(pieces), Segment.REASONING, dtype=np.int8)
    segments[ends > marker_start] = Segment.CONCLUDE
    segments[(ends > answer_start) & (lengths > 0)] = Segment.ANSWER
    segments[starts >= answer_end] = Segment.AFTER
    if own is not None:
        segments[~own] = Segment.OUTSIDE
    return segments
