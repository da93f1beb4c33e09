"""Types of command-line arguments: they refuse a value before anything heavy is imported."""

import argparse
import math


def whole(text: str, least: int = 0) -> int:
    """A whole number, at least 0."""
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: at least {least}")
    return int(text)


def positive(text: str) -> int:
    """A whole number, at least 1."""
    return whole(text, least=1)


def number(text: str) -> float:
    """A number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return float(text)


def share(text: str) -> float:
    """A number above 0, at most 1."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return float(text)


def listed(text: str) -> list[str]:
    """Words between commas, as in `a,b,c`; none is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r}: a list such as a,b,c, and none of them empty")
    return words
