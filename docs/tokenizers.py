"""Do the bytes of tokens make the text that `decode` returns, with every tokenizer class of transformers?

`python -m docs.tokenizers [FILE] > docs/evidence/tokenizers.md` writes the page in some minutes of a core. FILE: a GGUF file.
"""

import difflib
import importlib
import json
import sys
import tempfile
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import transformers
from transformers import AutoTokenizer

from docs.figures import table
from oar_plugin.passes.tokens import TokenBytes
from tests.passes.families import SENTENCES, mistral, tokenizer_and_bytes

SPECIAL = ["<unk>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "<s>", "</s>", "<pad>", "<mask>", "<|endoftext|>"]
TEXTS = [*SENTENCES, "  leading\n\n", "So \\boxed{😀}, 鱻. I don't , do not ."]
LENGTH = 4000
PAGE = """# Tokenizers

Answers are searched in the text that `decode` returns, and mapped to tokens by the bytes of each token. So the bytes of
all tokens of a response must be its text. Does that hold for the tokenizer classes of transformers {version}? Each was
built from a small vocabulary of a kind that it takes.

* *Agrees*: the bytes of all tokens are the text that `decode` returns without special tokens, for each of {texts} texts:
  formulas, Chinese, emoji, white space at both ends. Texts in which it shows U+FFFD, for bytes that are no character, are
  left out.
* *Split*: `exact` if 😀 has several tokens, and each of them has its bytes. Then all are tokens of the answer in
  `\\boxed{{😀}}`. No entry: it is one token, or an unknown character.
* Microseconds per token of a response of {length} tokens, when its tokens are new and when they are known: the median of
  the classes, and the slowest. Above ten are ByT5, whose `decode` is slow, and three for speech, which merge equal tokens,
  so that parts of the response are decoded (Lasr, Parakeet, Wav2Vec2).

`python -m docs.tokenizers FILE.gguf` writes this page.

{rows}
**Not built**: {left}. Some need packages that are not installed, others more files.

## Otherwise

The bytes of a token are what it adds to its own text; for a part of a character, what its name spells. If together they
are not the text of a response, white space is moved. If more differs, parts of the response are decoded, to find the
tokens that have another text there. Then:

| if | then |
|---|---|
| names and `decode` do not tell the bytes of a character | each of its tokens gets a share; a warning says so once |
| bytes are no character, as in a response that ends inside of one | they are kept, where `decode` shows U+FFFD or nothing |
| a token is outside the vocabulary | it has no bytes, or those of the unknown token if `decode` shows that |
| `decode` raises | the response falls back to GRPO, and counts as `search_failed` |
| a special token shows as text (Wav2Vec2's separator of words) | this text is missing |
"""


class Row(NamedTuple):
    decoder: str
    agrees: bool
    split: str
    name: str
    first: float
    later: float


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
    split = ("exact" if all(parts) else "**no**") if len(parts) > 1 and "😀" in decoded(tokenizer, emoji) else ""
    ids, seconds = (LENGTH * tokenizer.encode("".join(TEXTS), add_special_tokens=False))[:LENGTH], list[float]()
    token_bytes = TokenBytes(tokenizer)
    for _ in range(4):
        start = time.process_time()
        token_bytes.pieces(ids)
        seconds.append((time.process_time() - start) / LENGTH * 1e6)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder, left = getattr(backend, "decoder", None), "in pure Python" if backend is None else "none: joined by spaces"
    kinds = [step["type"] for step in _steps(json.loads(decoder.__getstate__()))] if decoder else [left]
    return Row(", ".join(kinds), agrees, split, name, seconds[0], min(seconds[1:]))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for one in decoder["decoders"] for step in _steps(one)] if "decoders" in decoder else [decoder]


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
    lines = []
    for (decoder, agrees, split), group in groupby(sorted(measured), lambda one: one[:3]):
        alike = [*group]
        names = ", ".join(one.name.removesuffix("Tokenizer") for one in alike)
        times = [one.first for one in alike], [one.later for one in alike]
        shown = (f"{median(of_kind):.1f} ({max(of_kind):.1f})" for of_kind in times)
        lines.append([decoder, names, "yes" if agrees else "**no**", split, *shown])
    head = " decoder | classes (without `Tokenizer`) | agrees | split | µs per token, new | known "
    missing = ", ".join(f"`{name}`" for name in left)
    version, texts = transformers.__version__, len(TEXTS)
    print(PAGE.format(version=version, texts=texts, length=LENGTH, rows=table(head, lines), left=missing), end="")
