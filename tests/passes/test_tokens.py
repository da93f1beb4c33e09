"""Token bytes add up to the decoded text, for every family of tokenizers, built here from a few sentences."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from docs.tokenizers import rows
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes
from tests.passes.families import BUILDERS, SENTENCES, tokenizer_and_bytes

every_tokenizer = pytest.mark.parametrize("name", BUILDERS)


def with_examples(test):
    for text in (*SENTENCES, " leading", "   three", "", "\n\n", "<think>hm</think> 🙂<|end|>", "<答案>"):
        test = example(text=text)(test)
    return test


@every_tokenizer
@given(text=st.text(max_size=40))
@settings(max_examples=60)
@with_examples
def test_pieces_add_up_to_the_decoded_text(name, text):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    pieces = token_bytes.pieces(ids := tokenizer.encode(text))
    assert len(pieces) == len(ids)
    assert token_bytes.pieces(torch.tensor(ids, dtype=torch.long)) == pieces
    decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert b"".join(pieces).decode() == decoded


@pytest.mark.parametrize("name", ["byte_level", "gguf", "llama_2", "gemma", "bytes", "mistral_common"])
def test_a_character_may_be_split_over_several_tokens_and_half_of_one_stays_what_it_is(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids = tokenizer.encode("鱻", add_special_tokens=False)
    pieces = token_bytes.pieces(ids)
    assert b"".join(pieces).strip() == "鱻".encode()
    assert [len(piece) for piece in pieces][-3:] == [1, 1, 1]
    assert token_bytes.pieces(ids[:-1]) == pieces[:-1]
    boxed = token_bytes.pieces(tokenizer.encode("So \\boxed{鱻}.", add_special_tokens=False))
    answer = segment_tokens(boxed, make_finder(["boxed"])) == Segment.ANSWER
    assert [piece for piece, inside in zip(boxed, answer, strict=True) if inside] == pieces[-3:]


@every_tokenizer
def test_special_tokens_and_unknown_ids_have_no_bytes(name):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    end, pad, unknown = tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer) + 7
    assert token_bytes.pieces([end, pad, unknown, -100, 2**40]) == [b""] * 5
    answer = tokenizer.encode("answer")
    assert token_bytes.pieces([end, *answer, unknown, end]) == [b"", *token_bytes.pieces(answer), b"", b""]


@pytest.mark.parametrize("name", ["byte_level", "gemma", "bytes"])
@pytest.mark.parametrize("marks", ["[/THINK]", "<|END_THINKING|>", "<|channel|> final <|message|>"])
def test_what_ends_the_thoughts_is_read_though_it_is_special(name, marks):
    tokenizer = BUILDERS[name]()
    tokenizer.add_special_tokens({"additional_special_tokens": [mark for mark in marks.split() if mark != "final"]})
    ids = tokenizer.encode("\\boxed{5}" + marks.replace(" ", "") + "The answer is 7.", add_special_tokens=False)
    segments = segment_tokens(pieces := TokenBytes(tokenizer).pieces(ids), make_finder(["boxed", "the_answer_is"]))
    assert [piece for piece, of in zip(pieces, segments, strict=True) if of == Segment.ANSWER][-1].strip() == b"7"


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


@every_tokenizer
@pytest.mark.parametrize("text", ["鱻", "\N{REPLACEMENT CHARACTER}"])
def test_endless_half_characters_are_decoded_a_few_times(name, text, monkeypatch):
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    half, decoded, decode = tokenizer.encode(text)[-2:-1] or [tokenizer.encode("a")[-1]], [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.extend(ids) or decode(ids, **options))
    assert len(token_bytes.pieces(10_000 * half)) == 10_000
    assert len(decoded) < 40_000


class Stripped(WithoutBackend):
    """As in SentencePiece's own models: white space at the ends of what is decoded is not shown."""

    vocabulary = ("<pad>", *"ab \n#5")

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return super().decode(ids, skip_special_tokens, clean_up_tokenization_spaces).strip()


def test_white_space_that_does_not_show_at_the_ends_has_its_token_inside():
    tokenizer = Stripped()
    ids = [tokenizer.vocabulary.index(letter) for letter in " a b\n\n##5 \na"]
    pieces = TokenBytes(tokenizer).pieces(ids)
    assert pieces == [b"", b"a", b" ", b"b", b"\n", b"\n", b"#", b"#", b"5", b" ", b"\n", b"a"]
    assert b"".join(TokenBytes(tokenizer).pieces([2, *1000 * [3], 4, 6, 3])) == b"b" + 1000 * b" " + b"\n5"


class Nameless(WithoutBackend):
    """Tokens are bytes, which no name tells."""

    def convert_ids_to_tokens(self, token_id):
        return f"token {token_id}"

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return bytes(ids).decode("utf-8", "replace")


def test_where_the_bytes_of_tokens_are_not_known_the_text_is_right_and_a_warning_says_so_once(caplog):
    token_bytes, data = TokenBytes(Nameless()), "x is \\boxed{😀}, 鱻.".encode()
    for _ in range(2):
        assert token_bytes.pieces(list(data)) == [bytes([byte]) for byte in data], "each has its share of a character"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["Nameless"]


@every_tokenizer
def test_after_the_first_time_a_response_is_decoded_once_or_in_parts(name, monkeypatch):
    """Tokenizers in pure Python collect their special tokens when they skip them, which took milliseconds per token."""
    tokenizer, token_bytes = tokenizer_and_bytes(name)
    ids, skips, decode = 100 * tokenizer.encode(SENTENCES[0]), list[bool](), tokenizer.decode
    pieces = token_bytes.pieces(ids)
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: skips.append(options) or decode(ids, **options))
    assert token_bytes.pieces(ids) == pieces
    assert len(skips) == 1
    assert name == "mistral_common" or not skips[0]["skip_special_tokens"]


@pytest.mark.nightly
def test_every_tokenizer_class_of_transformers_agrees_with_decode():
    measured, _ = rows()
    assert len(measured) > 60
    assert {row.name for row in measured if not row.agrees or row.split is False} <= {"Wav2Vec2CTCTokenizer"}
