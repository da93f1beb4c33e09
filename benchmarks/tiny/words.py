"""One small vocabulary of whole words for all tasks.

A token is a word with the space before it, so that the text reads as a tokenizer's would, and the answer is found in it as in
any other text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from recipes.cpu_demo.task import MARKER, WORDS

DIGITS = tuple("0123456789")
NAMES = tuple("ABCDEFGHIJ")
SYMBOLS = ("+", "-", "=", ";", "?", "->", ":", "/", MARKER)
SPECIAL = ("<pad>", "<eos>")
VOCABULARY: tuple[str, ...] = (*DIGITS, *NAMES, *SYMBOLS, *WORDS, *SPECIAL)

_ID = {word: index for index, word in enumerate(VOCABULARY)}
PAD, EOS = _ID["<pad>"], _ID["<eos>"]
MARK = _ID[MARKER]
FILLER = frozenset(_ID[word] for word in WORDS)
VALUES = frozenset(_ID[word] for word in (*DIGITS, *NAMES))

_PIECES = tuple(b"" if word in SPECIAL else f" {word}".encode() for word in VOCABULARY)


def encode(words: Iterable[str]) -> list[int]:
    """Ids of words. Raises KeyError for a word that is not in the vocabulary."""
    return [_ID[word] for word in words]


def pieces(ids: Sequence[int]) -> list[bytes]:
    """The bytes of each token, `b""` for padding and end of sequence: what `segment_tokens` reads."""
    return [_PIECES[index] for index in ids]


def text(ids: Sequence[int]) -> str:
    """The words, special tokens left out."""
    return b"".join(pieces(ids)).decode().strip()
