"""Token bytes add up to the decoded text, for every family of tokenizers, built here from a few sentences."""

import functools
import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from oar_plugin.passes.tokens import TokenBytes

SENTENCES = [
    "The answer is \\boxed{42}. So $x^2 + \\frac{1}{2} = 3$, and that's it.",
    "你好，世界。答案是五。",
    "Emoji 🙂👩‍👧 and accents: déjà vu, naïve.\n\n#### 18",
    "<answer>  two  spaces </answer>",
]
COMMON = {"special_tokens": ["<unk>", "<|end|>"], "show_progress": False}


def trained(backend, trainer, change=None):
    """A tokenizer from a backend, with two added tokens that are not special; `change` comes after the training."""
    backend.train_from_iterator(SENTENCES * 3, trainer)
    if change is not None:
        change(backend)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<答案>", special=False)])
    names = {"unk_token": "<unk>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def byte_level(nested=False):
    """`nested`: a decoder that is not known, around one that is, takes the generic way."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet, decoder = pre_tokenizers.ByteLevel.alphabet(), decoders.ByteLevel()
    backend.decoder = decoders.Sequence([decoder, decoders.Replace(Regex("x{9}"), "")]) if nested else decoder
    return trained(backend, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, **COMMON))


def byte_fallback_bpe(strip):
    settings = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    backend = Tokenizer(models.BPE(**settings))
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)

    def add_bytes(backend):
        """The trainer can only add byte tokens as special ones, which they are not."""
        model = json.loads(backend.to_str())["model"]
        vocabulary = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
        backend.model = models.BPE(vocabulary, [tuple(merge) for merge in model["merges"]], **settings)

    return trained(backend, trainers.BpeTrainer(vocab_size=120, limit_alphabet=60, **COMMON), add_bytes)


def unigram_metaspace():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return trained(backend, trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", **COMMON))


def word_piece():
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return trained(backend, trainers.WordPieceTrainer(vocab_size=200, **COMMON))


BUILDERS = {
    "byte_level": byte_level,
    "llama_2": lambda: byte_fallback_bpe(strip=True),
    "gemma": lambda: byte_fallback_bpe(strip=False),
    "unigram": unigram_metaspace,
    "word_piece": word_piece,
    "unknown_decoder": lambda: byte_level(nested=True),
}
every_tokenizer = pytest.mark.parametrize("name", BUILDERS)


@functools.cache
def tokenizer_and_bytes(name):
    tokenizer = BUILDERS[name]()
    return tokenizer, TokenBytes(tokenizer)


def joined_and_decoded(name, ids, errors="strict"):
    """Both ways from ids to text."""
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    pieces = token_bytes.pieces(ids)
    assert len(pieces) == len(ids)
    assert token_bytes.pieces(torch.tensor(ids, dtype=torch.long)) == pieces
    decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return b"".join(pieces).decode("utf-8", errors), decoded


def with_examples(test):
    for text in (*SENTENCES, " leading", "   three", "", "\n\n", "<think>hm</think> 🙂<|end|>", "<答案>"):
        test = example(text=text)(test)
    return test


@every_tokenizer
@given(text=st.text(max_size=40))
@settings(max_examples=60)
@with_examples
def test_pieces_add_up_to_the_decoded_text(name, text):
    joined, decoded = joined_and_decoded(name, tokenizer_and_bytes(name)[0].encode(text))
    assert joined == decoded


@given(data=st.data())
@settings(max_examples=60)
def test_any_sequence_of_byte_level_ids_adds_up(data):
    size = len(tokenizer_and_bytes("byte_level")[0])
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    joined, decoded = joined_and_decoded("byte_level", ids, "replace")
    assert joined == decoded


@pytest.mark.parametrize("name", ["byte_level", "llama_2", "gemma"])
def test_a_character_may_be_split_over_several_tokens_and_half_of_one_stays_what_it_is(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    pieces = token_bytes.pieces(tokenizer.encode("鱻"))
    assert b"".join(pieces).strip() == "鱻".encode()
    assert [len(piece) for piece in pieces][-3:] == [1, 1, 1]
    half = tokenizer.encode("鱻")[:-1]
    assert token_bytes.pieces(half) == pieces[:-1]


@every_tokenizer
def test_special_tokens_and_unknown_ids_have_no_bytes(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    end, pad, unknown = tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer) + 7
    assert token_bytes.pieces([end, pad, unknown, -100]) == [b""] * 4
    answer = tokenizer.encode("answer")
    assert token_bytes.pieces([end, *answer, unknown, end]) == [b"", *token_bytes.pieces(answer), b"", b""]


class WithoutBackend:
    """The part of a tokenizer in pure Python that is used: one character a token."""

    all_special_ids = (0,)
    added_tokens_decoder = {}  # noqa: RUF012
    vocabulary = ("<pad>", *"abc{}\\ound5")

    def convert_ids_to_tokens(self, token_id):
        return self.vocabulary[token_id]

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(self.vocabulary[token_id] for token_id in ids)


def test_a_tokenizer_in_pure_python_is_decoded_token_by_token():
    assert TokenBytes(WithoutBackend()).pieces([1, 0, 2, 99, 3]) == [b"a", b"", b"b", b"", b"c"]
