"""The bytes that each token of a response contributes to its text, in which the answer is searched."""

import json
import re
from collections.abc import Sequence
from typing import Any

import torch

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MOST_WAITING = 8
"""Maximum number of tokens that wait for their text. A character has at most four; without a limit, time is quadratic."""

# The inverse of GPT-2's table from bytes to characters: printable Latin-1 is itself, the other bytes are counted from 256.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


class TokenBytes:
    """Turns the token ids of a response into the bytes of each token.

    ``b"".join(token_bytes.pieces(ids))`` is the text that ``tokenizer.decode(ids, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`` returns, in UTF-8, but keeps bytes that are not valid (a character cut in half).

    - byte-level BPE (GPT-2, Qwen, Llama 3): by GPT-2's table;
    - SentencePiece in the ``tokenizers`` format (Llama 2, Gemma, T5): ``▁`` is a space, ``<0x0A>`` a byte, and ``pieces``
      drops the space before the first word if ``decode`` does;
    - others (WordPiece, tokenizers in pure Python): by decoding each token after its predecessor, which is slower. The last
      token of a character has all its bytes, likewise of white space that ``decode`` shows only before other text; of more
      than eight tokens, some is lost. The text equals ``decode``'s if the text of a token depends on its neighbours only.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._table: dict[int, bytes] = {}
        self.special = set(tokenizer.all_special_ids)
        self.special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        steps = _flat_steps(json.loads(decoder.__getstate__())) if decoder is not None else []
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._metaspace = kinds == ["Metaspace"] and steps[0]["replacement"] == "▁"
        self._byte_fallback = "ByteFallback" in kinds
        sentence_piece = self._metaspace or _is_replace_chain(steps)
        strips = sentence_piece and kinds[-1] == "Strip"
        self._drops_first_space = steps[0]["prepend_scheme"] != "never" if self._metaspace else strips
        self._by_table = self._byte_level or sentence_piece

    def pieces(self, ids: Sequence[int] | torch.Tensor) -> list[bytes]:
        """The bytes of each token of one response, ``b""`` for special tokens and ids outside the vocabulary."""
        id_list: list[int] = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        if not self._by_table:
            return self._decoded_in_context(id_list)
        self._table |= {token_id: self._bytes_of(token_id) for token_id in set(id_list) - self._table.keys()}
        pieces = [self._table[token_id] for token_id in id_list]
        first = next((position for position, piece in enumerate(pieces) if piece), None)
        if self._drops_first_space and first is not None:
            pieces[first] = pieces[first].removeprefix(b" ")
            if self._metaspace:  # this decoder drops every "▁" of the first token, not only the one in front
                pieces[first] = (self._token(id_list[first]) or "").replace("▁", "").encode()
        return pieces

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Returns each token of one response as readable text: half a character as ``\\xe2``, a special token as its name."""
        texts = [piece.decode("utf-8", errors="backslashreplace") for piece in self.pieces(ids)]
        names = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [text or str(name) for text, name in zip(texts, names, strict=True)]

    def _token(self, token_id: int) -> str | None:
        """The vocabulary entry of a token that has text; None for other tokens."""
        if token_id in self.special or token_id < 0:
            return None
        try:
            return self._tokenizer.convert_ids_to_tokens(token_id)
        except LookupError:  # from tokenizers in pure Python, for ids outside their vocabulary
            return None

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            known = [_BYTE_LEVEL[character] for character in token if character in _BYTE_LEVEL]
            # An added token may have other characters ("<答案>"); `decode` then returns it unchanged.
            return bytes(known) if len(known) == len(token) else token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte.group(1), 16)])
        return token.replace("▁", " ").encode()

    def _decoded_in_context(self, ids: list[int]) -> list[bytes]:
        pieces = [b""] * len(ids)
        shown = [position for position, token_id in enumerate(ids) if self._token(token_id) is not None]
        # `context`: tokens with known text, which is `before`; they are decoded again because they may change the text of
        # the next ones. `waiting`: the tokens since then.
        context, before, waiting = list[int](), "", list[int]()
        for position in shown:
            waiting.append(position)
            after = self._decode(context + [ids[one] for one in waiting])
            # A character may be incomplete, and white space may show only before other text: the text of such tokens belongs
            # to the token that completes it.
            if (after == before or after.endswith("\N{REPLACEMENT CHARACTER}")) and position != shown[-1]:
                if len(waiting) < _MOST_WAITING:
                    continue
                first = waiting.pop(0)
                alone = self._decode([*context, ids[first]])
                if alone != before:
                    pieces[first] = alone[len(before) :].encode()
                    context = [ids[first]]
                    before = self._decode(context)
                continue
            pieces[position] = after[len(before) :].encode()
            context, waiting = [ids[one] for one in waiting], []
            before = self._decode(context)
        return pieces

    def _decode(self, ids: list[int]) -> str:
        return "".join(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _flat_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder in the ``tokenizers`` format, with nested sequences flattened."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat_steps(inner)]


def _is_replace_chain(steps: list[dict[str, Any]]) -> bool:
    """Whether these are the steps of Llama 2 and Gemma: Replace, [ByteFallback,] Fuse[, Strip]."""
    kinds = [step["type"] for step in steps if step["type"] != "ByteFallback"]
    if kinds not in (["Replace", "Fuse"], ["Replace", "Fuse", "Strip"]):
        return False
    replaces = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    strips = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
    return replaces == [({"String": "▁"}, " ")] and strips in ([], [(" ", 1, 0)])
