r"""Finds the final answer of a response, and compares it with the ground truth by math-verify.

The finder of the importance finds it, so that reward and credit read the same answer. A last number without an announcement is
not an answer: a truncated response could be rewarded by chance, and importance would have no answer span.
Functions that call math-verify run in the processes of a `pool`: some expressions take unbounded time or memory.
"""

import functools
import logging
import re
import unicodedata
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import OPTION, find_in_turns, make_finder, parts_of

_find, _find_box = make_finder(OarConfig().answer_patterns), make_finder(("boxed",))

# What math-verify cannot read, or reads otherwise: `3e2` as 3 times e times 2, `10 000` as 0.
_CHARACTERS = str.maketrans(
    dict(zip("∞·×°、−⁄", [r"\infty ", r"\cdot ", r"\times ", r"^\circ ", ",", "-", "/"], strict=True))
)
_RAISED = re.compile("(?P<up>[⁰¹²³⁴-⁹⁺⁻ⁿⁱ]+)|(?P<down>[₀-₉ₙ]+)|(?P<fraction>[½⅓⅔¼¾⅕-⅞])")
_MATH_MODE = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_ROOT = re.compile(
    r"(?:√|(?<![\\A-Za-z])sqrt)\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]|\\d?frac\{[^{}]*\}\{[^{}]*\})|(?=\{))"
)
_THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:(?:\\[,;:!> ]|\{,\}|[ ~'’])\d{3})+(?!\d)")
_MIXED = re.compile(r"(?<![\w.^}/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_SCIENTIFIC = re.compile(
    r"(?<![\w.^}])(?P<a>\d+(?:\.\d+)?|\.\d+)[eE](?P<b>[+-]?\d{1,3})(?![\w.{])|(?<![\w.^}/])(?P<c>\d+(?:\.\d+)?|\.\d+)\s*"
    r"(?:\\times|\\cdot|\\ast|[*•]|[xX](?=\s*10\s*\^))\s*\{?10\}?\s*(?:\^|\*\*)\s*\{?\s*(?P<d>[+-]?\d{1,3})(?:\s*\}|(?![\d.^]))"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
# Words around a number that say nothing about it. With other words, math-verify finds no number.
_BEFORE = re.compile(
    r"(?i)^\s*(?:(?:about|approximately|approx\.?|roughly|around|exactly|precisely|simply|just|only|(?:a |the )?total(?: of)?"
    r"|equals?(?: to)?|US(?=\\?\$)|USD|Rs\.?|option|choice|[€£¥₹≈~:]|\\approx)\s*)+|^(?=[^=]*[A-Za-z]{3})[A-Za-z' ]+=(?=[^=]*$)"
)
_UNIT = r"(?:[kcm]?m|[km]?g|s|h|mol|k?J|erg|N|W|V|L)(?:\^?\{?-?\d\}?)?"
_AFTER = re.compile(
    r"\s*\([a-z -]*\)$|(?:\s+(?:(?=[A-Za-z'’-]{3})(?=[^\saeiou]*[aeiou])[A-Za-z'’-]+|of|in|to|by|at|an?|on)(?![\w(^{]))+"
    rf"(?:\s*\^\{{?\d\}}?)?$|\s*{_TEXT.pattern}(?:\s*\^\{{?\d\}}?)?$|\s+{_UNIT}(?:(?:\s*/\s*{_UNIT})+|(?<=[\d}}]))$|\s*[^\x00-\u03ff\W\d_]+$"
)
_REASON = re.compile(
    r"(?s)\s*(?:[,;(–—-]\s*|\s)(?:because|since|which|therefore|thus|hence|so|as (?:required|expected))\b.*"
)
_OTHER_MEANING = re.compile(  # `5 million`, `5 and a half`, `5 or more`, `less than 5`, `5万`, `5-10`, `> 5`
    r"(?i)(?<!\\)\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|hundred|thousand|[bmtr]+illion|no"
    r"|dozen|hal(?:f|ves)|thirds?|fourths?|quarters?|fifths?|squared|cubed|factorial|power|root|plus|minus|times|negative|modulo|up"
    r"|divided|not|never|than|least|most|more|less|fewer|greater|higher|lower|between|over|under|above|below|except|but|excluding"
    r"|besides|phi|psi|alpha|beta|gamma|delta|theta|lambda|sigma|omega)\b|n't\b|[万亿千百十半以或和到不]|\d\s*[–—~]\s*\d"
    r"|^\s*(?:[<>≤≥≠]|\\(?:[gl]eq?|neq?|[gl]t)\b)"
)
_OPTION = re.compile(
    r"(?s)(?:\(([A-Z])\)(?!\s*(?:and|or|[,&/;])?\s*\([A-Z]\))|([A-Z])\s*(?:[).:](?!\s*(?:and|or|[,&/;])?\s*[A-Z](?:[).:]|$))|$))"
)


def final_answer(response: str | Sequence[str], truths: Sequence[str] = ()) -> str | None:
    """Return the answer by which a response, or a model's turns in order, is graded; None if there is none.

    Boxes that are one answer are joined by commas. Where no truth is a letter, a box counts before an announced letter.
    """
    turns = [response] if isinstance(response, str) else response
    if (found := find_in_turns(_find, turns)) is None:
        return None
    (number, answer), letter = found, re.compile(r"\(?[A-Z]\)?")
    if truths and not any(map(letter.fullmatch, truths)) and OPTION.fullmatch(turns[number], answer.start, answer.end):
        answer = _find_box(turns[number]) or answer
    return ", ".join(dict.fromkeys(parts_of(turns[number], answer)))


def compare(ground_truth: str, answer: str) -> bool | None:
    """Return whether an answer means the same as the ground truth; None if math-verify cannot parse the answer.

    Decimals are compared to six places; numbers below 0.01 to five significant digits.
    """
    from math_verify import verify

    plain_truth, plain = _plain(ground_truth), _plain(answer)
    truth, given = (_TEXT.sub(r"\1", text).strip() for text in (plain_truth, plain))
    if re.fullmatch(r"\(?[A-Z]\)?", truth) and (option := _OPTION.match(_BEFORE.sub("", given))):
        return (option[1] or option[2]) == truth.strip("()")
    if "".join(truth.split()) == "".join(given.split()):
        return True
    if re.fullmatch(r"(?=.*[aeiou])[A-Za-z' -]{3,}", truth):  # math-verify would compare letters in any order
        return "".join(truth.split()).casefold() == "".join(given.split()).casefold()
    known, parts = _parse(plain_truth), _parse(_mathematics(plain))
    if not re.search(r"\\circ|_|%", answer) and any(map(_contradicts, parts)):  # degrees, bases: math-verify drops them
        return False
    places = max([0, *(place for part in (*known, *parts) for place in _leading_zeros(part))])
    # The pool limits the time. math-verify's own limit uses signals, which cannot interrupt a long operation on big numbers.
    equal = bool(verify(known, parts, 6 + places, 15 + places, timeout_seconds=None))
    return None if not equal and all(isinstance(part, str) for part in parts) else equal


def canonical(answer: str) -> str:
    """Return one text for all answers that are parsed to one expression (5, 5.0, `x = 5`); without spaces if none is."""
    from math_verify.grader import unwrap_eq
    from sympy import nsimplify

    for part in _parse(_mathematics(_plain(answer))):
        if not (isinstance(part, str) or _contradicts(part)):
            return str(nsimplify(unwrap_eq(part), rational=True))
    return "".join(answer.split())


def _plain(text: str) -> str:
    """Return a text without math mode, in characters and numbers that math-verify can read."""

    def raised(match: re.Match[str]) -> str:
        plain = unicodedata.normalize("NFKC", match[0]).replace("−", "-")
        if match["fraction"]:
            fraction = r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
            alone = text[: match.start()].endswith(("√", "^", "/")) or _RAISED.match(text, match.end())
            return f"{{{fraction}}}" if alone else fraction
        return f"^{{{plain}}}" if match["up"] else f"_{{{plain}}}"

    text = re.sub(r"°[CF]\b", "", unicodedata.normalize("NFKC", _RAISED.sub(raised, text))).translate(_CHARACTERS)
    text = _MATH_MODE.sub(" ", re.sub(r"^\s*[–—‑‐]|(?<=\d)[‑‐](?=\d)", "-", text)).lstrip().rstrip(" .,;:\n")
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), re.sub(r"\^(-\d+)", r"^{\1}", text))
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}" if match[1] or match[2] else r"\sqrt", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return _SCIENTIFIC.sub(lambda m: f"{Decimal(m['a'] or m['c']).scaleb(int(m['b'] or m['d'])):f}", text)


def _mathematics(plain: str) -> str:
    """Return an answer of `_plain` without the words around it, `18` of `18 dollars per day`; empty if it says more."""
    plain = _REASON.sub("", plain)
    if r"\begin" in plain:
        return plain
    if _OTHER_MEANING.search(_TEXT.sub(r" \1 ", plain)):
        return ""
    for text in (plain, _TEXT.sub(r" \1 ", plain)):  # a unit in \text{}, then an answer in \text{}
        bare = re.sub(r"\b(?:is|are|equals)\b", "=", _AFTER.sub("", _AFTER.sub("", text)))
        if bare := _BEFORE.sub("", _TEXT.sub(r" \1 ", bare)).lstrip(" ,;:=").rstrip(" .,;:"):
            return bare
    return plain


@functools.lru_cache(maxsize=1024)  # all responses of a group have the same ground truth
def _parse(text: str) -> list[Any]:
    """Return math-verify's parses of an expression; a string among them was not parsed as mathematics."""
    from math_verify import LatexExtractionConfig, parse

    # In a box, all of the text is one expression; without one, math-verify would take a part.
    targets = [LatexExtractionConfig(boxed_match_priority=0)]
    parts = list(parse(rf"\boxed{{{text}}}", targets, parsing_timeout=None))
    if any(not isinstance(part, str) for part in parts):
        return parts
    # math-verify cannot parse a percentage in a box, but it can behind dollar signs.
    number = text.rstrip("%\\ ")
    return list(parse(f"${number}${text[len(number) :]}", targets, parsing_timeout=None)) or parts


def _leading_zeros(part: Any) -> Iterator[int]:
    """Yield how many zeros follow the decimal point of each number in a parse, but for the first: 2 for 0.00025."""
    from sympy import log

    if not getattr(part, "is_number", False):
        for inner in part.flat() if hasattr(part, "flat") else getattr(part, "args", ()):
            yield from _leading_zeros(inner)
    elif (size := abs(part.evalf(5))).is_positive and size.is_finite:
        yield int(-log(size, 10).evalf(5)) - 1


def _contradicts(part: Any) -> bool:
    """Return whether a parse has an equation of two different numbers: `2 = 3`, `x = 2 = 3`, but not `1/3 = 0.33`."""
    from math_verify import verify
    from sympy import Eq

    equations = set() if isinstance(part, str) else part.atoms(Eq)
    pairs = [one.args for one in equations if all(side.is_number for side in one.args)]
    return not all(verify(*pair, 2, timeout_seconds=None) for pair in pairs)


def warm_up() -> None:
    """Load math-verify and its parser. It takes a second, which must not count against a comparison's time limit."""
    # math-verify warns that its own time limits are off, and about every expression that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _parse(r"\frac{1}{2}")
