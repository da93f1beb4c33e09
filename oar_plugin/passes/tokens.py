"""The bytes that each token of a response contributes to its text, in which the answer is searched."""

import re
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import Any

import torch

from oar_plugin.credit.answer import END_OF_THOUGHTS
from oar_plugin.output import warn_once

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# GPT-2's names of bytes: printable Latin-1 is itself, the others are counted from 256. ByT5 names all by their number.
_OTHERS = [byte for byte in range(256) if byte <= ord(" ") or ord("~") < byte < ord("¡") or byte == 0xAD]
_BYTES = {chr(byte): byte for byte in range(256)} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}

_LOST = "\N{REPLACEMENT CHARACTER}"  # what `decode` shows in place of bytes that are no character
# White space and such bytes (U+DC80 to U+DCFF with `surrogateescape`), which may show in one context and not in another.
_LOOSE, _FIRM = re.compile(rf"[\s{_LOST}\udc80-\udcff]+"), re.compile(rf"[^\s{_LOST}\udc80-\udcff]")
_SPACE, _LOST_AHEAD = re.compile(r"\s"), re.compile(rf"\s{{0,4}}{_LOST}")
_CONTEXT = 4  # units of tokens that are decoded before others, since their text may change that of the next ones


class TokenBytes:
    """Turns the token ids of a response into the bytes of each token.

    ``b"".join(token_bytes.pieces(ids))`` is the text that ``tokenizer.decode(ids, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`` returns, in UTF-8, but keeps bytes that are not valid (a character cut in half).

    This holds for every tokenizer, because ``decode`` is asked. The bytes of a token are what it adds to its own text; those of
    a part of a character are what its name spells (``ĠÃ``, ``<0xF0>``), if ``decode`` agrees. Where a response's text differs
    in white space, that is moved. Where it differs in more, decoding parts of the response tells which tokens have another
    text. If only several together have one, each gets a share of its bytes, and a warning says so once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._table: dict[int, tuple[str, bytes | None]] = {}
        self._marks: dict[int, bytes] = {}  # special tokens that end thoughts or begin a channel -> their names
        self._partial: set[int] = set()  # tokens that may be parts of characters
        self.special = set(tokenizer.all_special_ids)
        # Mistral's has no added tokens but a method of this name, and names of tokens without the bytes of half characters,
        # which the tokenizer inside has. It decodes to names, unless it skips special tokens. Here these are never decoded:
        # tokenizers in pure Python would collect them at each call.
        inside = getattr(getattr(tokenizer, "tokenizer", None), "instruct_tokenizer", None)
        if inside is None:
            self.special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        named = tokenizer.convert_ids_to_tokens
        self._spelling = getattr(getattr(inside, "tokenizer", None), "id_to_byte_piece", named)
        self._options = {"skip_special_tokens": inside is not None, "clean_up_tokenization_spaces": False}

    def pieces(self, ids: Sequence[int] | torch.Tensor) -> list[bytes]:
        """The bytes of each token of one response, ``b""`` for special tokens and ids outside the vocabulary.

        Special tokens that end the thoughts of a model (``[/THINK]``) or begin a channel (gpt-oss) have those of their name.
        """
        id_list: list[int] = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        self._table |= {token_id: self._known(token_id) for token_id in set(id_list) - self._table.keys()}
        known = [self._table[token_id][1] for token_id in id_list]
        shown = [token_id for token_id, piece in zip(id_list, known, strict=True) if piece is not None]
        pieces, text = [piece for piece in known if piece is not None], self._decode(shown)
        if b"".join(pieces).decode("utf-8", "replace") != text:
            self._align(pieces, shown, text)
        rest = iter(pieces)
        return [
            self._marks.get(i, b"") if piece is None else next(rest) for i, piece in zip(id_list, known, strict=True)
        ]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Returns each token of one response as readable text: half a character as ``\\xe2``, a special token as its name."""
        texts = [piece.decode("utf-8", errors="backslashreplace") for piece in self.pieces(ids)]
        return [text or self._table[token_id][0] for text, token_id in zip(texts, ids, strict=True)]

    def _decode(self, ids: list[int]) -> str:
        return "".join(self._tokenizer.decode(ids, **self._options))

    def _known(self, token_id: int) -> tuple[str, bytes | None]:
        """The name of a token, and its bytes after other tokens; None if it has no text."""
        try:
            name = self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < 2**31 else None
            if name is None or token_id in self.special:
                if END_OF_THOUGHTS.fullmatch(str(name)) or name in ("<|channel|>", "<|message|>"):
                    self._marks[token_id] = str(name).encode()
                return str(name), None
            once, twice = self._decode([token_id]), self._decode([token_id, token_id])
        except (LookupError, ValueError):  # of tokenizers in pure Python, outside the vocabulary
            return "None", None
        spelled, byte = self._spelling(token_id), _BYTE_TOKEN.fullmatch(str(name))
        if byte or not twice or _LOST in twice:
            if isinstance(spelled, str):  # 0 for a character that stands for no byte: then `decode` does not agree
                spelled = bytes.fromhex(byte[1]) if byte else bytes(_BYTES.get(character, 0) for character in spelled)
            both = 2 * spelled
            agreed = twice.strip() in {both.decode("utf-8", errors).strip() for errors in ("replace", "ignore")}
            if agreed or _LOST in twice:
                self._partial.add(token_id)
            if agreed:
                return str(name), spelled
        # The first token may have no space before it, the last one a sign that its word is not complete.
        text = twice.removeprefix(once) if twice.startswith(once) else twice.removesuffix(once)
        return str(name), text.encode("utf-8", "surrogatepass")

    def _align(self, pieces: list[bytes], ids: list[int], text: str) -> None:
        """Changes the pieces of tokens, in place, so that together they are this text."""
        starts = [n for n in range(len(ids)) if not (n and {ids[n - 1], ids[n]} <= self._partial)]
        units = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        todo, sure = [(0, len(units), text)], True
        while todo:
            low, high, text = todo.pop()
            guesses = [b"".join(pieces[unit]).decode("utf-8", "surrogateescape") for unit in units[low:high]]
            same = _LOOSE.sub("", "".join(guesses)) == _LOOSE.sub("", text)
            if not same and high - low > 1:
                middle, begin = (low + high) // 2, units[max(0, low - _CONTEXT)].start
                before, half = (self._decode(ids[begin : units[end].start]) for end in (low, middle))
                half = half[len(commonprefix([before, half])) :]  # noqa: RUF071  texts, not paths
                shared, last = len(commonprefix([half, text])), self._decode(ids[units[middle - 1]])  # noqa: RUF071
                alike = shared + len(last) >= len(half)  # the last token may have another text where the text ends
                cut, sure = shared if alike else len(half), sure and alike
                todo += [(low, middle, text[:cut]), (middle, high, text[cut:])]
                continue
            for unit, guess, part in zip(units[low:high], guesses, _split(text, guesses), strict=True):
                broken = any("\udc80" <= character <= "\udcff" for character in guess)
                if part != guess and not (broken and (same or _LOST in part)):
                    data, size = part.encode("utf-8", "surrogatepass"), unit.stop - unit.start
                    pieces[unit] = [data[len(data) * n // size : len(data) * (n + 1) // size] for n in range(size)]
                    sure = sure and (same or size == 1)
        if not sure:
            name, fault = type(self._tokenizer).__name__, "`decode` does not tell the text of each token"
            warn_once("%s: %s; an answer may seem to begin or end a few tokens away from where it does", name, fault)


def _split(text: str, guesses: list[str]) -> Iterator[str]:
    """The part of a text for each guess. They have the same firm characters; a single guess gets all."""
    firm, end = (match.end() for match in _FIRM.finditer(text)), 0
    for guess in guesses[:-1]:
        begin = end
        for character in guess:
            if not _LOOSE.match(character):
                end = next(firm)
            elif shown := (_SPACE if character.isspace() else _LOST_AHEAD).match(text, end):
                end = shown.end()
        yield text[begin:end]
    yield text[end:]
