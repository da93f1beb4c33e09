"""Types of command-line arguments: they refuse a value before anything heavy is imported."""

import argparse
import math


def positive(text: str) -> int:
    """A whole number, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


def whole(text: str) -> int:
    """A whole number, at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: at least 0")
    return number


def number(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


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
