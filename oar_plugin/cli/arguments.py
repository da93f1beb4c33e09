"""Types of command-line arguments."""

import argparse


def positive(text: str) -> int:
    """A whole number, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number
