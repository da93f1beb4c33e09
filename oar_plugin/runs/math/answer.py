r"""Finds the final answer of a response, and compares it with the ground truth by math-verify.

The finder of the importance finds it, so that reward and credit read the same answer. A last number without an announcement is
not an answer: a truncated response could be rewarded by chance, and importance would have no answer span.
Functions that call math-verify run in the processes of a `pool`: some expressions take unbounded time or memory.
"""

import functools
import logging
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations
from typing import Any

from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import make_finder

_find = make_finder(OarConfig().answer_patterns)

# What math-verify cannot read, or reads otherwise: `3e2` as 3 times e times 2, `10 000` as 0.
_SYMBOLS = {"∞": r"\infty ", "·": r"\cdot ", "×": r"\times ", "°": r"^\circ ", "、": ",", "−": "-", "–": "-"}
_SYMBOLS |= {power: f"^{{{value}}}" for value, power in zip("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", strict=True)}
_CHARACTERS = str.maketrans(_SYMBOLS | {part: f" {part}" for part in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"})
_MATH_MODE = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_ROOT = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:(?:\\[,;:!> ]|\{,\}|[ ~'’])\d{3})+(?!\d)")
_MIXED = re.compile(r"(?<![\w.^}/])(\d+)\s+(\d+)\s*[/⁄]\s*(\d+)(?![\d.])")
_SCIENTIFIC = re.compile(
    r"(?<![\w.^}/])(\d+(?:\.\d+)?|\.\d+)(?:[eE]([+-]?\d+)(?![\w.{])"
    r"|\s*(?:\\times|\\cdot|\*|x(?=\s*10\s*\^))\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))(?![\d.^]))"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
# A word of prose; no command, function, or product of variables (`5 xyz`).
_WORD = (
    r"(?<![\\\w{])(?!(?:(?:arc)?(?:sin|cos|tan|sec)h?|exp|log|min|max|mod|gcd|lcm|det|alpha|beta|theta|lambda|abc|cde|ijk|mno)\b)"
    r"(?:(?=\w{3})[A-Za-z]*[aeiou][A-Za-z]*|of|an|in|to|by|a(?=\s+(?!sin|cos|tan|log)[a-z]{3})|[^\x00-\u03ff\W\d_]+)(?![A-Za-z}])"
)
_WORDS_AROUND = re.compile(
    rf"^(?:[\s:,]*(?:{_WORD}|{_TEXT.pattern}))+[\s:,]*|(?:[\s,]*(?:{_WORD}|{_TEXT.pattern})(?:\s*\^\{{?\d\}}?)?)+[\s.]*$"
)
_OTHER_MEANING = re.compile(  # `less than 5`
    r"\b(?:not|never|than|least|most|between|over|under|above|below|or (?:more|less|fewer))\b|n't\b", re.IGNORECASE
)
_OPTION = re.compile(r"\(?([A-Z])(?:\)|\s*[:.]|$)(?!.*(?:\band|\bor|[,&/])\s*\(?[A-Z]\b)", re.DOTALL)


def final_answer(response: str) -> str | None:
    """Return the answer by which a response is graded; None if the response has none."""
    span = _find(response)
    return response[span.start : span.end] if span else None


def compare(ground_truth: str, answer: str) -> bool | None:
    """Return whether an answer means the same as the ground truth; None if math-verify cannot parse the answer.

    Decimals are compared to six places; numbers below 0.01 to five significant digits.
    """
    from math_verify import verify

    truth, given = (_TEXT.sub(r"\1", _plain(text)).strip() for text in (ground_truth, answer))
    if re.fullmatch(r"\(?[A-Z]\)?", truth) and (option := _OPTION.match(given)):
        return option[1] == truth.strip("()")
    same = "".join(truth.split()).casefold() == "".join(given.split()).casefold()
    if same or not re.search(r"\w", re.sub(_WORD, "", truth)):  # math-verify compares the letters of words in any order
        return same
    known, parts = _parse(_plain(ground_truth)), _parse(_mathematics(answer))
    if any(map(_contradicts, parts)):
        return False
    places = max([0, *(place for part in (*known, *parts) for place in _leading_zeros(part))])
    # The pool limits the time. math-verify's own limit uses signals, which cannot interrupt a long operation on big numbers.
    equal = bool(verify(known, parts, 6 + places, 15 + places, timeout_seconds=None))
    return None if not equal and all(isinstance(part, str) for part in parts) else equal


def canonical(answer: str) -> str:
    """Return the same text for all answers that math-verify parses to the same expression, as 5, 5.0 and `x = 5`.

    An answer that cannot be parsed is returned without spaces.
    """
    from math_verify.grader import unwrap_eq
    from sympy import nsimplify

    for part in _parse(_mathematics(answer)):
        if not (isinstance(part, str) or _contradicts(part)):
            return str(nsimplify(unwrap_eq(part), rational=True))
    return "".join(answer.split())


def _plain(text: str) -> str:
    """Return a text without math mode, in characters and numbers that math-verify can read."""
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).replace("}^{", "")
    text = _THOUSANDS.sub(
        lambda match: re.sub(r"\D", "", match[0]), _MATH_MODE.sub(" ", text).lstrip().rstrip(" .,;:\n")
    )
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text).replace("⁄", "/")
    return _SCIENTIFIC.sub(lambda match: f"{Decimal(match[1]).scaleb(int(match[2] or match[3] or match[4])):f}", text)


def _mathematics(answer: str) -> str:
    """Return an answer in plain notation without the words around it: `18` of `18 dollars per day`; empty for an argument."""
    prose = re.sub(r"\b(?:is|are|equals)\b", "=", _plain(answer))
    if r"\begin" in prose:
        return prose
    bare = _WORDS_AROUND.sub("", prose) or _WORDS_AROUND.sub("", _TEXT.sub(r"\1", prose)) or _plain(answer)
    argument = _OTHER_MEANING.search(prose) or ("=" in bare and re.search(_WORD, bare))
    return "" if argument else bare.lstrip(" ,;:=").rstrip(" .,;:")


@functools.lru_cache(maxsize=1024)  # all responses of a group have the same ground truth
def _parse(text: str) -> list[Any]:
    """Return math-verify's parses of an expression; a string among them was not parsed as mathematics."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    # All of the text in a box is one expression; without it, math-verify would take a part.
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
    from sympy import And, Eq

    chains = [] if isinstance(part, str) else part.atoms(And, Eq)
    sides = [{side for eq in chain.atoms(Eq) for side in eq.args if side.is_number} for chain in chains]
    return not all(verify(*pair, 2, timeout_seconds=None) for each in sides for pair in combinations(each, 2))


def warm_up() -> None:
    """Load math-verify and its parser. It takes a second, which must not count against a comparison's time limit."""
    # math-verify warns that its own time limits are off, and about every expression that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _parse(r"\frac{1}{2}")
