"""Token bytes add up to the decoded text, for every family of tokenizers, built here from a few sentences."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes

SENTENCES = [
    "The answer is \\boxed{42}. So $x^2 + \\frac{1}{2} = 3$, and that's it.",
    "你好，世界。答案是五。",
    "Emoji 🙂👩‍👧 and accents: déjà vu, naïve.\n\n#### 18",
    "<answer>  two  spaces </answer>",
] * 3
SPECIAL = ["<unk>", "<|end|>"]
HEX_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrapped(backend):
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<答案>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>", pad_token="<|pad|>"
    )


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return wrapped(backend)


def byte_fallback_bpe(strip):
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    trainer = trainers.BpeTrainer(vocab_size=120, limit_alphabet=60, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    # The trainer can only add byte tokens as special ones, which they are not.
    model = json.loads(backend.to_str())["model"]
    vocabulary = model["vocab"] | {token: len(model["vocab"]) + n for n, token in enumerate(HEX_BYTES)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend.model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    return wrapped(backend)


def unigram_metaspace():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return wrapped(backend)


def word_piece():
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return wrapped(backend)


def nested_byte_level():
    """A decoder that is not known, around one that is: takes the generic way."""
    tokenizer = byte_level()
    steps = [decoders.ByteLevel(), decoders.Replace(Regex("x{9}"), "")]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


BUILDERS = {
    "byte_level": byte_level,
    "llama_2": lambda: byte_fallback_bpe(strip=True),
    "gemma": lambda: byte_fallback_bpe(strip=False),
    "unigram": unigram_metaspace,
    "word_piece": word_piece,
    "unknown_decoder": nested_byte_level,
}
TOKENIZERS = {}


def tokenizer_and_bytes(name):
    if name not in TOKENIZERS:
        tokenizer = BUILDERS[name]()
        TOKENIZERS[name] = (tokenizer, TokenBytes(tokenizer))
    return TOKENIZERS[name]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    "sentence", [*SENTENCES[:4], " leading", "   three", "", "\n\n", "<think>hm</think> 🙂<|end|>"]
)
def test_pieces_add_up_to_the_decoded_text(name, sentence):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids = tokenizer.encode(sentence)
    pieces = token_bytes.pieces(ids)
    assert len(pieces) == len(ids)
    assert b"".join(pieces).decode() == decoded(tokenizer, ids)


@pytest.mark.parametrize("name", BUILDERS)
@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=60)
def test_pieces_add_up_for_any_unicode_text(name, text):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids = tokenizer.encode(text)
    assert b"".join(token_bytes.pieces(ids)).decode() == decoded(tokenizer, ids)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_sequence_of_byte_level_ids_adds_up(data):
    tokenizer, token_bytes = tokenizer_and_bytes("byte_level")
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    assert b"".join(token_bytes.pieces(ids)).decode("utf-8", "replace") == decoded(tokenizer, ids)


@pytest.mark.parametrize("name", ["byte_level", "llama_2", "gemma"])
def test_a_character_may_be_split_over_several_tokens(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids = tokenizer.encode("鱻")
    pieces = token_bytes.pieces(ids)
    assert b"".join(pieces).strip() == "鱻".encode()
    assert [len(piece) for piece in pieces][-3:] == [1, 1, 1]


@pytest.mark.parametrize("name", BUILDERS)
def test_special_tokens_and_unknown_ids_have_no_bytes(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert token_bytes.pieces([end, pad, len(tokenizer) + 7, -100]) == [b""] * 4
    answer = tokenizer.encode("answer")
    with_noise = token_bytes.pieces([end, *answer, len(tokenizer) + 7, end])
    assert with_noise == [b"", *token_bytes.pieces(answer), b"", b""]


@pytest.mark.parametrize("name", BUILDERS)
def test_added_tokens_that_are_not_special_keep_their_text(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids = tokenizer.convert_tokens_to_ids(["<think>", "<答案>"])
    assert [piece.strip().decode() for piece in token_bytes.pieces(ids)] == ["<think>", "<答案>"]


@pytest.mark.parametrize("name", ["byte_level", "word_piece"])
def test_ids_may_be_a_tensor(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids = tokenizer.encode(SENTENCES[0])
    assert token_bytes.pieces(torch.tensor(ids)) == token_bytes.pieces(ids)


def test_a_response_that_begins_with_a_space_loses_it_where_decode_drops_it():
    for name, expected in [("llama_2", b"the"), ("gemma", b" the"), ("byte_level", b" the")]:
        tokenizer, token_bytes = tokenizer_and_bytes(name)
        ids = tokenizer.encode(" the" if name != "llama_2" else "the")
        assert b"".join(token_bytes.pieces(ids)) == expected


def test_half_a_character_stays_what_it_is():
    tokenizer, token_bytes = tokenizer_and_bytes("llama_2")
    ids = tokenizer.convert_tokens_to_ids(["a", "<0xE4>", "<0xBD>"])
    assert token_bytes.pieces(ids) == [b"a", b"\xe4", b"\xbd"]


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


@pytest.mark.parametrize("name", BUILDERS)
def test_the_answers_tokens_are_found_with_every_tokenizer(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids = tokenizer.encode("So the answer is 5. <answer>42</answer> and that's it.")
    pieces = token_bytes.pieces(ids)
    pattern = r"regex:<\s*answer\s*>(.*?)<\s*/\s*answer\s*>"  # word pieces come back with spaces around signs
    segments = segment_tokens(pieces, make_finder([pattern]))
    answer = b"".join(piece for piece, segment in zip(pieces, segments, strict=True) if segment == Segment.ANSWER)
    assert b"42" in answer
    assert len(answer.strip(b" <>")) == 2
