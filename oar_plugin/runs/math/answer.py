r"""Finds the final answer of a response, and compares it with the ground truth by math-verify.

The finder of the importance finds it, so that reward and credit read the same answer. A last number without an announcement is
not an answer: a truncated response could be rewarded by chance, and importance would have no answer span.
Functions that call math-verify run in the processes of a `pool`: some expressions take unbounded time or memory.
"""

import functools
import logging
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import regex
import yaml
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.grader import unwrap_eq
from sympy import Eq, log, nsimplify

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import OPTION, find_in_turns, make_finder, parts_of

_nfkc = functools.partial(unicodedata.normalize, "NFKC")
_find, _find_box = make_finder(OarConfig().answer_patterns), make_finder(("boxed",))
_PATTERNS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_WORDS = SimpleNamespace(**{name: regex.compile(pattern, regex.VERBOSE) for name, pattern in _PATTERNS.items()})

# What math-verify cannot read, or reads otherwise: `3e2` as 3 times e times 2, `10 000` as 0. In this order.
_SIGNS: Any = {"∞": r"\infty ", "·": r"\cdot ", "×": r"\times ", "°": r"^\circ ", "、": ",", "−": "-", "⁄": "/"}
_NOTATION: list[tuple[str, Any]] = [
    (r"(?s)^\s*([*`]+)(.*)\1\s*$", r"\2"),
    ("[⁰¹²³⁴-⁹⁺⁻ⁿⁱ]+", lambda m: f"^{{{_nfkc(m[0])}}}"),
    ("[₀-₉ₙ]+", lambda m: f"_{{{_nfkc(m[0])}}}"),
    ("[½⅓⅔¼¾⅕-⅞]", lambda m: r"\frac{{{}}}{{{}}}".format(*_nfkc(m[0]).split("⁄"))),
    ("(?s).+", lambda m: _nfkc(m[0]).translate(str.maketrans(_SIGNS))),
    (r"^\s*[–—‑‐]|(?<=\d)[‑‐](?=\d)", "-"),
    # The `$` of mathematics, and money.
    (r"(?:\b[A-Z]{1,2}(?=\\?\p{Sc} ?\d))?\\?\p{Sc}|\\(?:pounds|textdollar|euro)(?!\p{L})|(?<!\\)\\[()\[\]]", " "),
    (r"\\(?:text|textbf|textit|textrm|textsf|mbox|mathrm|mathbf)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<!\\)\\!", ""),
    (r"(?:\s|(?<!\\)(?:~|\\[,;:> ]|\\(?:(?:en|thin|med|thick)?space|q?quad)(?!\p{L})))+", " "),
    (r"\^ ?(?:\\circ|\{ ?\\circ ?\}) ?[CF]\b|\\degree(?!\p{L})", ""),
    (r"(?i)(?<![\\\p{L}])infinity\b", r"\\infty"),
    (r"^ |(?<![ .,;:])[ .,;:]+$", ""),
    (r"(?<=(?<![\\\p{L}])\p{L}) ?(?:\\cdot|\*) ?(?=\p{L}(?!\p{L}))", " "),  # `A \cdot B` is AB
    (r"\^(-\d+|\\d?frac\{\d+\}\{\d+\})", r"^{\1}"),
    # `(1,200)` is a point, `(1,200, 2)` has thousands.
    (r"(?:[(\[]|\\\{)-?\d{1,3}(?:,\d{3})+\s*(?:[)\]]|\\\})", lambda m: m[0].replace(",", ", ")),
    (
        r"(?<![\w.,])[1-9]\d{0,2}(?:(?:\\[,;:!> ]|\{[ ,]\}|[ ~'’,])\d{3})+(?!\d|,\d)",
        lambda m: regex.sub(r"\D", "", m[0]),
    ),
    (r"(?:√|(?<![\\A-Za-z])sqrt)\s*(\([^()]*\)|\d+(?:\.\d+)?|[A-Za-z]|\\d?frac\{[^{}]*\}\{[^{}]*\})", r"\\sqrt{\1}"),
    (r"√|(?<![\\A-Za-z])sqrt", r"\\sqrt"),
    (r"(?<![\w.^}/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (_WORDS.scientific, lambda m: f"{Decimal(m[1] or m[2]).scaleb(int(m[4])):f}"),
]


def final_answer(response: str | Sequence[str], truths: Sequence[str] = ()) -> str | None:
    """Return the answer by which a response, or a model's turns in order, is graded; None if there is none.

    Boxes that are one answer are joined by commas; where each equals a truth, they are notations of it and the last counts.
    Where no truth is a letter, a box counts before an announced letter.
    """
    turns = [response] if isinstance(response, str) else response
    if (found := find_in_turns(_find, turns)) is None:
        return None
    turn, answer = turns[found[0]], found[1]
    parts = list(dict.fromkeys(parts_of(turn, answer)))
    if truths and not parts[1:] and OPTION.fullmatch(parts[0]) and (box := _find_box(turn)):
        letter = any(_WORDS.letter.fullmatch(_plain(truth)) for truth in truths)
        parts = parts if letter else parts_of(turn, box)
    if len(parts) > 1 and any(all(compare(truth, part) for part in parts) for truth in truths):
        return parts[-1]
    return ", ".join(parts)


def compare(ground_truth: str, answer: str) -> bool | None:
    """Return whether an answer means the same as the ground truth; None if math-verify cannot parse the answer.

    Decimals are compared to six places; numbers below 0.01 to five significant digits.
    """
    truth, given = _plain(ground_truth), _plain(answer)
    if _WORDS.letter.fullmatch(truth) and (option := _WORDS.option.match(_WORDS.before.sub("", given))):
        return option[1] == truth.strip("()")
    truth, given = _mathematics(truth), _mathematics(given)
    if "".join(truth.split()) == "".join(given.split()):
        return True
    known, parts = _parse(truth), _parse(given)
    if not regex.search(r"\\circ|_|%", answer) and any(map(_contradicts, parts)):  # math-verify drops degrees and bases
        return False
    places = max(map(_leading_zeros, (*known, *parts)), default=0)
    # The pool limits the time. math-verify's own limit uses signals, which cannot interrupt a long operation on big numbers.
    equal = bool(verify(known, parts, 6 + places, 15 + places, timeout_seconds=None))
    unparsed = all(isinstance(part, str) for part in parts) and not all(isinstance(part, str) for part in known)
    return None if unparsed and not equal else equal


def canonical(answer: str) -> str:
    """Return one text for all answers that are the same text or are parsed to one expression (5, 5.0, `x = 5`)."""
    part = next((part for part in _parse(_mathematics(_plain(answer))) if not _contradicts(part)), answer)
    return "".join((part if isinstance(part, str) else str(nsimplify(unwrap_eq(part), rational=True))).split())


def _plain(text: str) -> str:
    """Return a text without math mode and money, in characters and numbers that math-verify can read."""
    for pattern, replacement in _NOTATION:
        text = regex.sub(pattern, replacement, text)
    return text


def _mathematics(plain: str) -> str:
    """Return an answer of `_plain` without words that say nothing about its value: `18` of `18 dollars per day`."""

    def unless_units(match: Any) -> str:
        words = regex.sub(r"\b(?:of|to|by|at|an?|on|as)\s|\^\s*\{?-?\d\}?", " ", match[1])
        units = all(map(_WORDS.unit.fullmatch, regex.split(r"(?:[\s,/-]|\\cdot)+", words.strip(" /-,"))))
        return "" if units and not _WORDS.other_meaning.search(match[0]) else match[0]

    if r"\begin" in (plain := _WORDS.reason.sub("", plain)):
        return plain
    bare = regex.sub(r"\b(?:is|are|equals)\b", "=", _WORDS.behind.sub(unless_units, plain))
    return _WORDS.before.sub("", bare).lstrip(" ,;:=").rstrip(" .,;:") or plain


@functools.lru_cache(maxsize=1024)  # all responses of a group have the same ground truth
def _parse(text: str) -> list[Any]:
    """Return math-verify's parses of an expression; a string among them is no mathematics: words, or not parsed."""
    texts = regex.split(r"\s*(?:[,;&]|\band\b|\bor\b)\s*", text.strip("\\{} "))
    if all(map(_WORDS.name.fullmatch, texts)):  # folded in case and accents; several of them in any order
        folded = [unicodedata.normalize("NFKD", each.casefold()) for each in texts]
        return [", ".join(sorted(_WORDS.folded.sub("", each) for each in folded))]
    if len(regex.findall(r"(?<!\\)\b\p{L}{3,}", text)) > 6:  # prose, which the parser reads for seconds
        return [text]
    # Between dollar signs, all of the text is one expression. math-verify knows a percentage by the sign behind them.
    number = text.rstrip("%\\ ")
    return list(parse(f"$${number}$${text[len(number) :]}", [LatexExtractionConfig()], parsing_timeout=None))


def _leading_zeros(part: Any) -> int:
    """Return how many zeros follow the decimal point of the smallest number in a parse, but for the first: 2 for 0.00025."""
    if getattr(part, "is_number", False):
        size = abs(part.evalf(5))
        return max(0, int(-log(size, 10).evalf(5)) - 1) if size.is_positive and size.is_finite else 0
    inner = part.flat() if hasattr(part, "flat") else getattr(part, "args", ())
    return max(map(_leading_zeros, inner), default=0)


def _contradicts(part: Any) -> bool:
    """Return whether a parse has an equation of two different numbers: `2 = 3`, `x = 2 = 3`, but not `1/3 = 0.33`."""
    equations = set() if isinstance(part, str) else part.atoms(Eq)
    pairs = [one.args for one in equations if all(side.is_number for side in one.args)]
    return not all(verify(*pair, 2, timeout_seconds=None) for pair in pairs)


def warm_up() -> None:
    """Load math-verify's parser. It takes a second, which must not count against a time limit. ImportError: it cannot parse."""
    # math-verify warns that its own time limits are off, and about every expression that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    if not compare(r"\frac12", "0.5"):
        raise ImportError("math-verify does not find 0.5 equal to 1/2")
