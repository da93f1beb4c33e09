"""One small vocabulary of whole words for all tasks, and its tokenizer.

A token is a word with the space before it, so that the text reads as a tokenizer's would, and the answer is found in it as in
any other text.
"""

import itertools
import string
from collections.abc import Iterable, Sequence
from typing import Any

DIGITS = tuple("0123456789")
NAMES = tuple("ABCDEFGHIJ")
MARKER = "####"
SYMBOLS = ("+", "-", "=", ";", "?", "->", ":", "/", MARKER)
WORDS = ("so", "then", "now", "well", "ok", "next", "thus", "hmm", "we", "see", "go", "on", "let", "us", "add", "it")
"""Filler: real entropy that decides nothing."""
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


def make_tokenizer(size: int | None = None, by_bytes: bool = False) -> Any:
    """A byte-level `PreTrainedTokenizerFast`: each word of `VOCABULARY`, with the space before it, is one token of the same id.

    Args:
        size: of the vocabulary. Behind the words stand the end of a turn that verl looks for in a Qwen3 tokenizer, the 256
            bytes, so that any other text can be encoded, and made-up words of four letters, which text never becomes but a
            model may write. None: the words alone, and anything else becomes padding; or the bytes alone.
        by_bytes: no text becomes a word: a token a byte, whatever it says. Without a size, bytes and `SPECIAL` are all.
    """
    # Imported here: verl loads this file in every process that grades.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [word if word in SPECIAL else f" {word}" for word in VOCABULARY]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*alphabet, *SPECIAL] if by_bytes and size is None else list(words)
    if size is not None:
        entries += ["<|im_end|>", *alphabet]
        if size < len(entries):
            raise ValueError(f"a tokenizer of {size} tokens has no room for words and bytes: at least {len(entries)}")
        made_up = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
        entries += itertools.islice(made_up, size - len(entries))
    core = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, [], unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = [*SPECIAL, "<|im_end|>"] if size is not None else SPECIAL
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if not by_bytes:
        # Found in the text before anything else is done to it: so they also are where AutoTokenizer takes the tokenizer beside
        # a Qwen2 model for Qwen's own, which parts digits from the space before them.
        core.add_tokens([AddedToken(word, normalized=False) for word in words if word not in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    tokenizer.chat_template = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
    return tokenizer
