"""Which tokens of a response are its final answer, which announce it and which are reasoning.

The segments are those of arXiv 2601.07408 (section on segments): ``reasoning | conclude | answer | after``. Only
reasoning tokens are scored and reshaped later; the answer's tokens are where the outcome is probed.

Answers are searched in the text and mapped back to tokens through byte offsets, because token borders and answer
borders rarely coincide (one token can hold ``}.`` or half of a multi-byte character).
"""

import enum
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import regex

from oar_plugin.credit import imported

PATTERN_SECONDS = 2.0
"""CPU seconds of this process that a user's regular expression may take for one text; ordinary ones take milliseconds."""


class Segment(enum.IntEnum):
    """What a response token is for; one value per token (arXiv 2601.07408, section on segments)."""

    OUTSIDE = 0  # not the policy's own token: tool output, padding
    REASONING = 1
    CONCLUDE = 2  # the marker that announces the answer
    ANSWER = 3
    AFTER = 4


class SearchFailed(Exception):
    """A user's own pattern failed on a text, so that nobody knows where its answer is; says which and how."""


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """Where an answer stands in a text, in characters (``str`` offsets).

    ``[start, end)`` is the answer without surrounding white space or decoration, never empty; ``[marker_start, start)``
    is what announces it (``\\boxed{``, ``#### ``). ``0 <= marker_start <= start < end <= len(text)``.
    """

    marker_start: int
    start: int
    end: int


# A user's own callable may return a span, (start, end) or (marker_start, start, end), in characters, or None.
AnswerFinder: TypeAlias = Callable[[str], "AnswerSpan | tuple[int, int] | tuple[int, int, int] | None"]

_Candidates: TypeAlias = Callable[[str], Iterator[AnswerSpan]]

# A longer "answer" in running text is an argument, not an answer. The limit also keeps a response that repeats
# "the answer is" forever from costing quadratic time.
_LONGEST_SENTENCE = 1000

# `\\boxed` after an escaped backslash still counts, as it does for reward functions that look for the last "\boxed".
_BRACES = re.compile(r"(?P<open>\\boxed\s*\{|\{)|(?P<close>\})|\\(?!\\boxed).", re.DOTALL)
# LaTeX also boxes a bare token; only a number or one capital letter is told apart from prose about "\boxed".
_BARE_BOX = re.compile(r"\\boxed +(-?\d+(?:[.,/]\d+)*|[A-Z])(?![\w{^/%]|[.,]\d|\\(?![)\]]))")
_HASH = re.compile(r"####(?<!#####)(?!#)([^\n]*)")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
# Two expressions, because one that begins with optional words is tried at every character of the text.
_PROSE_MARKER = re.compile(r"(?:[Aa]nswer|ANSWER)\**\s*(?:(?:is|IS)\b[\s*]*:?|:)")
_PROSE_LEAD = re.compile(r"(?:\*\*)?(?<!\w)(?:(?:the|my|our|final|correct)\s+){0,3}\Z", re.IGNORECASE)
_LONGEST_LEAD = 40
# A full stop inside a number or name ("3.14", "x.y") does not end the sentence; a closing tag and a new line do.
_SENTENCE_END = re.compile(r"\.(?!\w)|[?。？！\n]|</\w+>")
_LEADING_DECORATION = re.compile(r"(?:[\s$*]|\\[(\[])*")
# What `regex` takes for an approximate match ("{e<=1}") or a named class ("[[:alpha:]]"), and `re` for plain characters.
_READ_OTHERWISE = re.compile(r"(?<!\\)(?:\\\\)*(\{(?=[\d\s<=+]*[isde])|\[(?=:[^\]]*:\]))")


def _trimmed(text: str, marker_start: int, start: int, end: int, decoration: bool = False) -> AnswerSpan | None:
    """Narrow ``[start, end)`` to the answer proper: no white space and, on request, no ``$ * \\( \\[``, full stop."""
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
    """``\\boxed{...}`` with balanced braces, in one pass; unclosed and empty boxes are no candidates."""
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


def _matches(pattern: re.Pattern[str]) -> _Candidates:
    """Every match of ``pattern`` as a candidate: group 1 is the answer, perhaps with decoration."""

    def candidates(text: str) -> Iterator[AnswerSpan]:
        for match in pattern.finditer(text):
            if span := _trimmed(text, match.start(), *match.span(1), decoration=True):
                yield span

    return candidates


def _the_answer_is(text: str) -> Iterator[AnswerSpan]:
    """``the answer is ...``, ``Final answer: ...`` to the end of the sentence, or of the brace it stands in."""
    for marker in _PROSE_MARKER.finditer(text):
        lead = _PROSE_LEAD.search(text, max(0, marker.start() - _LONGEST_LEAD), marker.start())
        if lead is None:  # the end of a longer word
            continue
        leading = _LEADING_DECORATION.match(text, marker.end())
        start = leading.end() if leading else marker.end()
        limit = min(len(text), start + _LONGEST_SENTENCE)
        sentence_end = _SENTENCE_END.search(text, start, limit)
        if sentence_end is None and limit < len(text):
            continue
        end = _closing_brace(text, start, sentence_end.start() if sentence_end else limit)
        if span := _trimmed(text, lead.start(), start, end, decoration=True):
            yield span


def _closing_brace(text: str, start: int, end: int) -> int:
    """Where the ``}`` stands that closes a brace opened before ``start``; ``end`` if there is none before it."""
    depth = 0
    for token in _BRACES.finditer(text, start, end):
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if depth < 0:
            return token.start()
    return end


def _last_character(text: str) -> AnswerSpan | None:
    """The last character that is not white space: what ``make_finder(())`` finds."""
    end = len(text.rstrip())
    return AnswerSpan(end - 1, end - 1, end) if end else None


_NAMED: dict[str, _Candidates] = {
    "boxed": _boxed,
    "hash": _matches(_HASH),
    "answer_tag": _matches(_ANSWER_TAG),
    "the_answer_is": _the_answer_is,
}


def make_finder(patterns: Sequence[str]) -> Callable[[str], AnswerSpan | None]:
    r"""Build the function that finds the final answer of a response.

    Of all complete answers that any pattern finds, the one that starts last wins: the innermost ``5`` of
    ``<answer>\boxed{5}</answer>``, the last of several boxes. Markers that follow each other without text between
    them announce together: ``The answer is \boxed{`` is one marker.

    Args:
        patterns: how the answer may be written, each one of

            - ``boxed``: ``\boxed{...}`` with balanced braces, also ``\boxed 5``;
            - ``hash``: ``#### ...`` to the end of the line;
            - ``answer_tag``: ``<answer>...</answer>``;
            - ``the_answer_is``: ``the (final) answer is ...`` or ``Answer: ...`` to the end of the sentence. Prose
              behind the real answer can match too ("the answer is plausible"): for models that end this way;
            - ``regex:<expression>``: a Python regular expression whose group named ``answer``, or else group 1, is the
              answer and whose match begins the marker. It is run by the ``regex`` library, which can end a search
              (``PATTERN_SECONDS``) and differs from ``re`` in rare characters alone: for ``\w`` and ``\b``, combining
              marks are letters and ``²`` or ``½`` is none; ``\s`` leaves out U+001C to U+001F;
            - ``python:<module>:<function>``: a callable that takes the text and returns an ``AnswerSpan``,
              ``(start, end)``, ``(marker_start, start, end)`` or None. It is the user's code: nothing ends it when it
              takes long.

            Empty: for models without an answer format. The last character that is not white space is then the answer,
            so its last token; only the ``last`` probe makes sense on it.

    Returns:
        A function of the text, ``AnswerSpan`` or None. The text may hold lone surrogates, which stand for bytes that
        are not UTF-8. It raises ``SearchFailed`` where a pattern of the user's own took too long, raised, or returned
        something else.

    Raises:
        ValueError: a pattern is none of these, its expression does not compile, has no group, or is read otherwise by
            ``regex`` than by ``re``, or its function cannot be imported.
    """
    if isinstance(patterns, str):
        raise ValueError(f"answer patterns must be a list of strings, got the single string {patterns!r}")
    if not patterns:
        return _last_character
    sources = [_candidates_of(pattern) for pattern in patterns]

    def find(text: str) -> AnswerSpan | None:
        found = [span for source in sources for span in source(text)]
        if not found:
            return None
        answer = max(found, key=lambda span: span.start)
        marker_start = answer.marker_start
        for span in sorted(found, key=lambda span: span.marker_start, reverse=True):
            # This one's own answer text would begin where our marker does, or within it: nothing stands between them.
            if span.marker_start < marker_start <= span.start:
                marker_start = span.marker_start
        return replace(answer, marker_start=marker_start)

    return find


def _candidates_of(pattern: str) -> _Candidates:
    if pattern in _NAMED:
        return _NAMED[pattern]
    kind, _, value = pattern.partition(":")
    if kind == "regex":
        return _own_expression(pattern, value)
    if kind == "python":
        try:
            function = imported(pattern, "allowed: python:<module>:<function>")
        except ValueError as error:
            raise ValueError(f"answer pattern {pattern!r}: {error}") from error
        if not callable(function):
            raise ValueError(f"answer pattern {pattern!r}: it is not callable")

        def candidates(text: str) -> Iterator[AnswerSpan]:
            if span := _ask(function, text):
                yield span

        return candidates
    raise ValueError(
        f"answer pattern {pattern!r} is unknown; allowed are {', '.join(_NAMED)}, "
        "regex:<expression> and python:<module>:<function>"
    )


def _own_expression(pattern: str, expression: str) -> _Candidates:
    if other := _READ_OTHERWISE.search(expression):
        there = expression[other.start(1) :][:8]
        raise ValueError(f"answer pattern {pattern!r}: {there!r} has another meaning here; allowed: \\{other[1]}")
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


def _ask(finder: AnswerFinder, text: str) -> AnswerSpan | None:
    """Call a finder that may be a user's own; whatever it does, nothing but SearchFailed comes out of it."""
    name = str(getattr(finder, "__qualname__", type(finder).__qualname__))
    try:
        found = finder(text)
    except SearchFailed:
        raise
    except Exception as error:
        raise SearchFailed(f"answer finder {name} raised {type(error).__name__}") from error
    if found is None:
        return None
    try:
        offsets = (found.marker_start, found.start, found.end) if isinstance(found, AnswerSpan) else tuple(found)
        *marker, start, end = (operator.index(offset) for offset in offsets)
        (marker_start,) = marker or (start,)
    except Exception as error:
        what = f"{type(found).__name__} that is not two or three integers"
        raise SearchFailed(f"answer finder {name} returned {what}") from error
    if not 0 <= marker_start <= start <= end <= len(text):
        raise SearchFailed(f"answer finder {name} returned offsets that are out of order or outside the text")
    return _trimmed(text, marker_start, start, end)


def segment_tokens(pieces: Sequence[bytes], finder: AnswerFinder, own: np.ndarray | None = None) -> np.ndarray | None:
    """Sort the tokens of one response into segments (arXiv 2601.07408, section on segments).

    A token is ANSWER when its bytes overlap the answer's, else CONCLUDE when they overlap the marker's; own tokens
    before are REASONING, own tokens later AFTER. A token without bytes (a special token) goes by its position and is
    never ANSWER: inside the answer it is CONCLUDE.

    Args:
        pieces: the bytes of each token, T of them, ``b""`` for special tokens. Need not be valid UTF-8.
        finder: from :func:`make_finder`, or a callable of one's own with the same contract.
        own: bool ``[T]``, False where the policy did not write the token (tool output). Such tokens are OUTSIDE, and
            the finder sees new lines in their place, so that a tool's answer is never taken for the policy's.

    Returns:
        int8 ``[T]`` of :class:`Segment`, or None when the policy wrote no answer that the finder knows.

    Raises:
        SearchFailed: the finder raised, or returned something else than an answer.
        ValueError: ``own`` has not one value per token.
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

    # surrogateescape gives every byte that is not UTF-8 a character of its own, so encoding a prefix of the text again
    # counts exactly the bytes before it.
    text = data.decode("utf-8", "surrogateescape")
    span = _ask(finder, text)
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
