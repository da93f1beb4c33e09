"""Do the bytes of tokens make the text that `decode` returns, with every tokenizer class of transformers?

`python -m docs.tokenizers [FILE] > docs/evidence/tokenizers.md` writes the page in some minutes of a core. FILE: a GGUF file.
"""

import difflib
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import transformers
from transformers import AutoTokenizer

from oar_plugin.passes.tokens import TokenBytes
from tests.passes.families import SENTENCES, mistral, tokenizer_and_bytes

SPECIAL = ["<unk>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "<s>", "</s>", "<pad>", "<mask>", "<|endoftext|>"]
TEXTS = [*SENTENCES, "  leading\n\n", "So \\boxed{😀}, 鱻. I don't , do not ."]
LENGTH = 4000
PAGE = """# Tokenizers

Answers are searched in the text that `decode` returns, and mapped to tokens by the bytes of each token. So the bytes of all
tokens of a response must be its text. {built} tokenizers of classes of transformers {version} were tried, with small
vocabularies, on {texts} texts (formulas, Chinese, emoji, white space at both ends):

* The bytes are the text with all but {wrong}.
* {split} have several tokens for 😀, each with its own bytes (exceptions: {shared}). Then all are tokens of the answer in
  `\\boxed{{😀}}`.
* A response of {length} tokens takes at most {slowest:.1f} µs per token, with `{name}`.

Not built: {left}.

`python -m docs.tokenizers FILE.gguf` writes this page.

## Otherwise

The bytes of a token are what it adds to its own text. If these are not the response's text, parts of it are decoded. Then:

| if | then |
|---|---|
| a character's bytes cannot be told apart | each of its tokens gets a share; a warning says so once |
| bytes are no character | they are kept, where `decode` shows U+FFFD or nothing |
| a token is outside the vocabulary | it has no bytes, or those of the unknown token |
| `decode` raises | the response falls back to GRPO (`search_failed`) |
| a special token shows as text (Wav2Vec2's separator) | this text is missing |
"""


class Row(NamedTuple):
    name: str
    agrees: bool
    split: bool | None  # whether each token of a character has its bytes; None: the character is one token, or unknown
    seconds: float  # 1e-6, per token


def arguments(folder: Path) -> list[dict[str, Any]]:
    """What constructors are tried with: small vocabularies of each kind, as objects and in files."""
    kinds = ("byte_level", "gemma", "whole_words", "word_piece", "unigram")
    trained = [json.loads(tokenizer_and_bytes(kind)[0].backend_tokenizer.to_str())["model"] for kind in kinds]
    vocabularies = [[*dict.fromkeys([*model["vocab"], *SPECIAL])] for model in trained[:4]]
    byte, spm, words, pieces = ({token: n for n, token in enumerate(tokens)} for tokens in vocabularies)
    merges = [[tuple(merge) for merge in model["merges"]] for model in trained[:3]]
    unigram = [*{token: 0.0 for token in SPECIAL}.items(), *map(tuple, trained[4]["vocab"][1:])]
    going_on = [*SPECIAL, *(f"{token}@@".removesuffix("</w>@@") for token in words)]  # CTRL marks that a word goes on
    model = tokenizer_and_bytes("sentence_piece_bytes")[0].sp_model
    names = [*map(model.id_to_piece, range(model.get_piece_size())), "<pad>"]

    def file(name: str, content: Any) -> str:
        numbered = (
            json.dumps({token: n for n, token in enumerate(dict.fromkeys(content))}) if ".json" in name else content
        )
        (folder / name).write_bytes(numbered if isinstance(numbered, bytes) else numbered.encode())
        return str(folder / name)

    rules = [file(f"{n}.txt", "\n".join(["#", *(f"{a} {b}" for a, b in one), ""])) for n, one in enumerate(merges)]
    spm_file, spm_json = file("spm.model", model.serialized_model_proto()), file("spm.json", names)
    return [
        {},
        *({"vocab": v, "merges": m} for v, m in zip((byte, spm, words), merges, strict=True)),
        *({"vocab": vocabulary} for vocabulary in (unigram, pieces)),
        *({"vocab_file": one} for one in (spm_file, file("pieces.txt", "\n".join(pieces)))),
        {"vocab_file": file("characters.json", [*SPECIAL, "|", *"".join(TEXTS)])},
        {"vocab_file": file("byte.json", byte), "merges_file": rules[0]},
        *({"vocab_file": file(f"{len(one)}.json", one), "merges_file": rules[2]} for one in (words, going_on)),
        {"vocab_file": spm_json, "spm_file": spm_file},
        {"source_spm": spm_file, "target_spm": spm_file, "vocab": spm_json},
    ]


def classes() -> dict[str, Any]:
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/tokenization_*.py")):
        with suppress(ImportError, NameError):  # of packages that are not installed
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for kind in [*vars(module).values()]:
                if getattr(kind, "__module__", "") == module.__name__ and hasattr(kind, "convert_ids_to_tokens"):
                    found[kind.__name__] = kind
    return found


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def built(kind: Any, tried: list[dict[str, Any]]) -> Any:
    """The tokenizer with which the texts come back best; None if they are all but lost."""
    best, tokenizer = len(TEXTS) / 2, None
    for one in tried:
        with suppress(Exception):  # other arguments, other vocabularies, packages that are not installed
            made = kind(**one)
            read = [decoded(made, made.encode(text)) for text in TEXTS]
            alike = sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(TEXTS, read, strict=True))
            if alike > best + 0.01:
                best, tokenizer = alike, made
    return tokenizer


def row(name: str, tokenizer: Any) -> Row:
    token_bytes, texts = TokenBytes(tokenizer), [tokenizer.encode(text) for text in TEXTS]
    pairs = [(b"".join(token_bytes.pieces(ids)).decode("utf-8", "replace"), decoded(tokenizer, ids)) for ids in texts]
    agrees = all(joined == text for joined, text in pairs if "\N{REPLACEMENT CHARACTER}" not in text)
    before, emoji = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "a😀"))
    parts = token_bytes.pieces(emoji)[len(before) :]
    split = all(parts) if len(parts) > 1 and "😀" in decoded(tokenizer, emoji) else None
    ids = (LENGTH * tokenizer.encode("".join(TEXTS), add_special_tokens=False))[:LENGTH]
    token_bytes, start = TokenBytes(tokenizer), time.process_time()
    token_bytes.pieces(ids)
    seconds = (time.process_time() - start) / LENGTH * 1e6
    return Row(name, agrees, split, seconds)


def rows(*files: str) -> tuple[list[Row], list[str]]:
    """A row per class that was built, and the names of the others."""
    with tempfile.TemporaryDirectory() as folder:
        tried = arguments(Path(folder))
        made = {name: built(kind, tried) for name, kind in classes().items()}
        made |= {
            f"MistralCommonBackend ({name})": mistral(name) for name in ("tekken_240911.json", "tokenizer.model.v1")
        }
        for gguf in map(Path, files):
            made[f"GGUF ({gguf.stem})"] = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        return [row(name, one) for name, one in made.items() if one], [
            name for name, one in made.items() if one is None
        ]


if __name__ == "__main__":
    measured, left = rows(*sys.argv[1:])
    slowest = max(measured, key=lambda one: one.seconds)

    def named(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names) or "none"

    said = PAGE.format(
        built=len(measured),
        version=transformers.__version__,
        texts=len(TEXTS),
        wrong=named(one.name for one in measured if not one.agrees),
        split=sum(one.split is not None for one in measured),
        shared=named(one.name for one in measured if one.split is False),
        length=LENGTH,
        slowest=slowest.seconds,
        name=slowest.name,
        left=named(left),
    )
    paragraphs = said.split("\n\n")
    print("\n\n".join(fill(one, 128) if one.startswith("Not built") else one for one in paragraphs), end="")
