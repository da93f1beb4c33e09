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
_PROSE_MARKER = re.compile(
    r"(?:[Aa]nswer|ANSWER)(?:[*_`}]*(?:</\w+>)?\s*(?:(?:is|IS)\b[\s*_]*[:：]?|[:：])|(?:s are|S ARE)\b[\s*_]*[:：]?)"
)
_PROSE_LEAD = re.compile(r"[*_]*(?<![^\W_])(?:(?:the|my|our|final|correct)\s+){0,3}\Z", re.IGNORECASE)
_LONGEST_LEAD = 40
# A full stop inside a number or name ("3.14", "x.y") or behind an abbreviation ends no sentence; a tag or a new line does.
_SENTENCE_END: Any = regex.compile(
    r"(?i)\.(?!\w)(?<!\b(?:appr|approx|ca|cf|e\.g|eq|est|i\.e|max|resp|rs|viz|vs|dr|mr|mrs|ms|mt|st)\.)|[?。？！\n]|</\w+>|<[|｜]"
)
# What stands around an answer: white space, math mode, Markdown, HTML, and the end of a `\\text{` that the marker stands in.
_LEADING = re.compile(r"(?:[\s$*}]|\\[(\[]|__|_(?=\s)|~~|==|```(?=\s)|</?(?:b|strong|em|i|u|mark|span|p|code|br)>)*")
_TRAILING = "$", "*", ".", r"\)", r"\]", "__", "~~", "=="
_PAIR = re.compile(
    r"\(([^][(){},;]+)\)|\[([^][(){},;]+)\]|（([^（），]+)）|【([^【】]+)】|「([^「」]+)」|“([^“”]+)”|\"([^\"]+)\"|'([^']+)'|‘([^’]+)’|«([^»]+)»|_([^_]+)_|`+([^`]+)`+"
)
_BRACKETS = {"(": ")", "[": "]", "（": "）", "【": "】", "「": "」", "“": "”"}
_BRACKET = re.compile(r"(?s)(?P<open>\\?[(\[（【「“]|\\boxed\s*\{|\{)|(?P<close>\\?[)\]）】」”]|\})|\\(?!\\boxed).")
# What a response says behind its thoughts counts, even if the thoughts have a box. gpt-oss announces its answer's channel.
END_OF_THOUGHTS = re.compile(
    r"(?i)(?:[<\[]|◁)/\|?(?:\w+[:_])?(?:think\w*|thoughts?|reasoning)\|?\s*[>\]▷]"
    r"|[<\[][|｜]?(?:(?:/|end[_▁]?(?:of[_▁]?)?)(?:think\w*|thoughts?|reasoning)|(?:thinking|think|thoughts?|reasoning)_end)[|｜]?[>\]]"
    r"|(?:<\|channel\|>|assistant)final(?:<\|message\|>)?|<channel\|>"
)
# Words behind "####" are an answer ("East") only at the end of a response. With a word of group 1 they always are a heading.
_HEADING = re.compile(
    r"(?i)(?:\(?(?:\d+(?:\.\d+)*|[a-z]|[ivx]+)[.):]?\)?\s+)?(?:((?:step|case|proof|method|approach|verif\w*|(?:double-?)?check\w*)\b"
    r"|(?:(?:final )?answer|conclu\w*|solution|expla\w*|summary|note|reason(?:ing)?|analy\w*)\b(?![^\n:]*:.*\d))|[^\W\d_]{2})"
)
# What an announcement introduces that is no value: a call, a program, a list, or the steps towards the answer.
_INTRODUCED = re.compile(
    r"(?i)[\s*_`]*(?:<[|｜]?(?:\w*tool|function|python|search|invoke|execute|code>)|\[(?:\w*tool|\w+\()|\{\s*\"|(?<=``)`?[a-z]\w*\n"
    r"|let(?:['’]s|\s+(?:us|me))\b|(?:first(?:ly)?|next|then|to start|step\s+\d+)\s*[,:]|action\s*:|to (?:solve|find|get)\b"
    r"|(?:we|i)(?:['’]ll\b|\s+(?:need|must|have|should|can|will|first|start|begin|use|call|apply|am)\b)"
    r"|(?:\(?[1a][.)]|step\s+1\b|[-+•])\s[^\n]{0,300}\n\s{0,9}[*_]*(?:\(?[2b][.)]|step\s+2\b|[-+•])\s)"
    r"|[^\S\n]*\n\s*(?:\*\s[^\n]{0,300}\n\s{0,9}\*\s|1[.)]\s+[^\W\d])"
)
# A letter as the answer to a multiple-choice question, with or without the words of that option.
OPTION = re.compile(
    r"(?i:(?:option|choice)\s+)?(?:\\(?:text|math)[a-z]*\s*\{\s*)?(?:\([A-Z]\)|[A-Z](?=$|[).:},]|\s+[-–—]\s))\s*\}?"
    r"(?:(?:[).:,]|\s+[-–—])?(?:\s|\\\s)+\S.*)?[).:]?"
)
# Between boxes that are one answer: "x = \boxed{1} or x = \boxed{4}". Words of an argument begin another answer, and many words
# in a new line do.
_JOINED = re.compile(
    r"[^.?!。=≈<>]{0,60}(?:[,;&、，；和或×∪∨]|\\(?:lor|vee|cup)\b|\b(?:and|or|as well as|while|by|y|o|et|ou|und|oder)\b)"
    r"[^.?!。=≈<>]{0,60}=?[\s$\\(\[*]{0,9}"
)
_ARGUED = re.compile(
    r"(?i)\b(?:so|thus|hence|therefore|then|no|not|wait|but|because|since|which|that|giv(?:es|ing)|yields?|equals?|instead|rather"
    r"|actually|now|i\.?e|namely|equivalent\w*|alternatively|simpl\w+|approx\w*|about|roughly|rounded|decimal|fraction|form|final\w*"
    r"|answer|total|check\w*|verif\w*|comput\w*|calculat\w*|substitut\w*|mistake|mean\w*|impl(?:y|ies)|we|i|let|precise\w*"
    r"|hmm+|oh|oops|sorry|corrections?|re-?check\w*|percent\w*|option|choice|letter|step|sum|product|difference)\b"
    r"|[+·×]|\\(?:cdot|times|frac|sqrt|div)|所以|因此|得|即|不|\n(?:\W*[^\W\d_]{2,}){3}"
)
# "The answer is correct" says nothing of what the answer is, if an earlier turn does.
_REMARK = re.compile(
    r"(?is)(?:\w+ly |indeed |also |still |now )*(?:correct|right|wrong|plausible|reasonable|consistent|confirmed|verified|valid"
    r"|clear|above|below|the same|what|boxed|shown|given|found|stated|unchanged|as (?:above|before|follows|expected|asked))\b.*"
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
    """``[start, end)`` without white space, and with ``decoration`` without what dresses an answer; None if it is empty."""
    before = None
    while before != (start, end):
        before = start, end
        while end > start and text[end - 1].isspace():
            end -= 1
        while start < end and text[start].isspace():
            start += 1
        if not decoration or start == end:
            continue
        if leading := _LEADING.match(text, start, end):
            start = leading.end()
        for mark in _TRAILING:
            if text.endswith(mark, start, end) and not (len(mark) == 1 and text.endswith("\\", start, end - 1)):
                end -= len(mark)
        if pair := _PAIR.fullmatch(text, start, end):
            start, end = pair.span(pair.lastindex or 0)
    return AnswerSpan(marker_start, start, end) if start < end else None


def _boxed(text: str) -> Iterator[AnswerSpan]:
    """``\\boxed{...}`` with balanced braces, in one pass; boxes that are empty or not closed are skipped."""
    open_braces: list[int] = []  # where their boxes begin; -1 for a brace without one
    first_box = text.find(r"\boxed")
    for token in _BRACES.finditer(text, first_box) if first_box >= 0 else ():
        if token.lastgroup == "open":
            open_braces.append(-1 if token.group() == "{" else token.start())
        elif token.lastgroup == "close" and open_braces:
            opening = open_braces.pop()
            if opening >= 0 and (span := _trimmed(text, opening, text.index("{", opening) + 1, token.start())):
                yield span
    for match in _BARE_BOX.finditer(text):
        yield AnswerSpan(match.start(), *match.span(1))


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[AnswerSpan]:
    for match in pattern.finditer(text):
        if span := _trimmed(text, match.start(), *match.span(1), decoration=True):
            yield span


def _the_answer_is(text: str) -> Iterator[AnswerSpan]:
    """``the answer is ...``, ``Final answer: ...`` up to the end of the sentence or of what encloses it."""
    for marker in _PROSE_MARKER.finditer(text):
        first = max(0, marker.start() - _LONGEST_LEAD)
        lead = _PROSE_LEAD.search(text, first, marker.start())
        if lead is None or _INTRODUCED.match(text, marker.end()):  # the marker is the end of a longer word
            continue
        leading = _LEADING.match(text, marker.end())
        start = leading.end() if leading else marker.end()
        limit = min(len(text), start + _LONGEST_SENTENCE)
        sentence_end = _SENTENCE_END.search(text, start, limit)
        if (sentence_end is None and limit < len(text)) or (sentence_end and sentence_end[0] in "?？"):
            continue
        end = sentence_end.start() if sentence_end else limit
        line = text[max(text.rfind("\n", 0, lead.start()) + 1, first) : marker.start()]
        enclosed = any(line.count(opening) > line.count(closing) for opening, closing in _BRACKETS.items())
        depth = 0
        for brace in (_BRACKET if enclosed else _BRACES).finditer(text, start, end):
            depth += (brace.lastgroup == "open") - (brace.lastgroup == "close")
            if depth < 0:  # it was opened before the answer
                end = brace.start()
                break
        for quote in "\"`_|'":
            at = text.find(quote, start, end) if line.count(quote) % 2 else -1
            if at >= 0 and (quote in '"`' or not text[at + 1 : end].strip()):
                end = at
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
    of ``<answer>\boxed{5}</answer>``. A letter announced in the last line (``Answer: C``) counts before a box without a letter.
    Empty or open boxes, placeholders (``...``), Markdown headings (``#### Check``), and announcements of a call, a list or a
    question are no answers. Markers without text between them are one marker: ``The answer is \boxed{``. The patterns are:

    - ``boxed``: ``\boxed{...}`` with balanced braces, also ``\boxed 5``;
    - ``hash``: ``#### ...`` to the end of the line;
    - ``answer_tag``: ``<answer>...</answer>``;
    - ``the_answer_is``: ``the (final) answer is ...`` or ``Answer: ...`` to the end of the sentence, also in later prose. With
      it, boxes that one sentence joins (``\boxed{1} or \boxed{4}``) are one answer, from the first to the last;
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
        found = [(one, of, _certainty(of, text, one)) for of, source in sources for one in source(text)]
        ends = [match.end() for match in END_OF_THOUGHTS.finditer(text)]
        order = ((bisect_right(ends, one.start), sure, one.start, one, of) for one, of, sure in found if sure >= 0)
        *_, answer, pattern = max(order, default=(None, None))
        if answer is not None and pattern == "boxed" and "the_answer_is" in patterns:
            boxes = sorted(one for one, of, sure in found if (of, sure) == ("boxed", 2))
            answer = _option(text, found) or _joined(text, answer, boxes)
        if answer is None:
            return None
        marker_start = answer.marker_start
        for span, *_ in sorted(found, key=lambda one: one[0].marker_start, reverse=True):
            # This span's own answer would begin at or inside of our marker, so there is no text between the two markers.
            if span.marker_start < marker_start <= span.start:
                marker_start = span.marker_start
        return answer._replace(marker_start=marker_start)

    return find


def _option(text: str, found: Iterable[tuple[AnswerSpan, str, int]]) -> AnswerSpan | None:
    """The letter that the last line announces, if no box has a letter."""
    last_line = text.rfind("\n", 0, len(text.rstrip())) + 1
    options = [(one, of) for one, of, _ in found if OPTION.fullmatch(text, one.start, one.end)]
    announced = [one for one, of in options if of in ("hash", "the_answer_is") and one.start >= last_line]
    return announced[-1] if announced and all(of != "boxed" for _, of in options) else None


def _joined(text: str, answer: AnswerSpan, boxes: list[AnswerSpan]) -> AnswerSpan:
    """The answer, extended to the boxes before it that the same sentence joins to it. `boxes` are in order."""
    for before, box in zip(boxes[-2::-1], boxes[::-1], strict=False):
        between = text, before.end, box.marker_start
        alike = len({OPTION.fullmatch(text, one.start, one.end) is None for one in (before, box)}) == 1
        if not alike or not _JOINED.fullmatch(*between) or _ARGUED.search(*between):
            break
        answer = before._replace(end=answer.end)
    return answer


def parts_of(text: str, answer: AnswerSpan) -> list[str]:
    """The texts of the boxes that an answer consists of; of any other answer its own text."""
    whole = text[answer.start : answer.end]
    if r"\boxed" not in whole:
        return [whole]
    return [text[a:b] for _, a, b in sorted(_boxed(text)) if answer.start <= a and b <= answer.end]


def find_in_turns(finder: AnswerFinder, turns: Sequence[str]) -> tuple[int, AnswerSpan] | None:
    """The number of the last of a model's turns that has an answer, and the answer in it; a remark counts after all others."""
    remark = None
    for number in reversed(range(len(turns))):
        if span := _call(finder, turns[number]):
            if not _REMARK.fullmatch(turns[number], span.start, span.end):
                return number, span
            remark = remark or (number, span)
    return remark


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
    False where the policy did not write the token (tool output). Such tokens are OUTSIDE. What lies between them is a turn: the
    finder gets one turn at a time, the last one first, with new lines in the place of the tokens behind it.

    SearchFailed: the finder raised, or returned something else. ValueError: ``own`` has another length.
    """
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    data, borders = b"".join(pieces), [0]
    if own is not None:
        own = np.asarray(own, dtype=bool)
        if own.shape != lengths.shape:
            raise ValueError(f"own has shape {own.shape}, expected {lengths.shape}: one value per token")
        characters = np.frombuffer(data, dtype=np.uint8).copy()
        characters[~np.repeat(own, lengths)] = ord("\n")
        data = characters.tobytes()
        borders += starts[1:][own[1:] & ~own[:-1]].tolist()

    # surrogateescape makes one character of every byte that is not UTF-8: a prefix of the text encodes to the bytes before it.
    texts = [data[a:b].decode("utf-8", "surrogateescape") for a, b in zip(borders, [*borders[1:], None], strict=True)]
    found = find_in_turns(finder, texts)
    if found is None and len(texts) > 1:
        texts = [data.decode("utf-8", "surrogateescape")]
        found = find_in_turns(finder, texts)
        if found and r"\boxed" not in texts[0][found[1].marker_start : found[1].start]:
            return None  # only a box goes on behind what others wrote in it
    if found is None:
        return None
    number, span = found
    marker_start, answer_start, answer_end = (
        borders[number] + len(texts[number][:offset].encode("utf-8", "surrogateescape"))
        for offset in (span.marker_start, span.start, span.end)
    )

    segments = np.full(len(pieces), Segment.REASONING, dtype=np.int8)
    segments[ends > marker_start] = Segment.CONCLUDE
    segments[(ends > answer_start) & (lengths > 0)] = Segment.ANSWER
    segments[starts >= answer_end] = Segment.AFTER
    if own is not None:
        segments[~own] = Segment.OUTSIDE
    return segments
