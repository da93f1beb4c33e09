"""A tokenizer of each family, trained here on a few sentences."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.implementations import (
    BertWordPieceTokenizer,
    ByteLevelBPETokenizer,
    CharBPETokenizer,
    SentencePieceUnigramTokenizer,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from oar_plugin.passes.tokens import TokenBytes

SENTENCES = [
    "The answer is \\boxed{42}. So $x^2 + \\frac{1}{2} = 3$, and that's it.",
    "你好，世界。答案是五。",
    "Emoji 🙂👩‍👧 and accents: déjà vu, naïve.\n\n#### 18",
    "<answer>  two  spaces </answer>",
]
COMMON = {"special_tokens": ["<unk>", "<|end|>"], "show_progress": False}
NAMES = {"unk_token": "<unk>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}


def trained(tokenizer, size, decoder=None, **settings):
    """One of the library's tokenizers, with another decoder if one is given."""
    tokenizer.train_from_iterator(SENTENCES * 3, size, **settings, **COMMON)
    if decoder is not None:
        tokenizer._tokenizer.decoder = decoder or None
    return with_added_tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **NAMES))


def byte_fallback_bpe(strip):
    settings = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    backend = Tokenizer(models.BPE(**settings))
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)

    backend.train_from_iterator(SENTENCES * 3, trainers.BpeTrainer(vocab_size=120, limit_alphabet=60, **COMMON))
    # The trainer can only add byte tokens as special ones, which they are not.
    model = json.loads(backend.to_str())["model"]
    vocabulary = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
    backend.model = models.BPE(vocabulary, [tuple(merge) for merge in model["merges"]], **settings)
    return with_added_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES))


def with_added_tokens(tokenizer):
    """Two, which are not special."""
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<答案>", special=False)])
    return tokenizer


def sentence_piece(kind, **options):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        with path.open("wb") as model:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(SENTENCES * 3), model_writer=model, model_type=kind, minloglevel=2, **options
            )
        return with_added_tokens(SentencePieceBackend(vocab_file=str(path), **NAMES | {"eos_token": "</s>"}))


def mistral(name):
    import mistral_common
    from transformers import MistralCommonBackend

    return MistralCommonBackend(Path(mistral_common.__file__).parent / "data" / name)


# Transformers decodes a GGUF file's byte-level BPE so. A name that is not of bytes would show the others' names.
GGUF = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
OTHER_STEPS = [decoders.ByteLevel(), decoders.Replace(Regex("x{9}"), "")]
BUILDERS = {
    "byte_level": lambda: trained(ByteLevelBPETokenizer(), 330),
    "gguf": lambda: trained(ByteLevelBPETokenizer(), 330, decoders.Sequence(GGUF)),
    "llama_2": lambda: byte_fallback_bpe(strip=True),
    "gemma": lambda: byte_fallback_bpe(strip=False),
    "unigram": lambda: trained(SentencePieceUnigramTokenizer(), 150, unk_token="<unk>"),
    "no_first_space": lambda: trained(SentencePieceUnigramTokenizer(add_prefix_space=False), 150, unk_token="<unk>"),
    "word_piece": lambda: trained(BertWordPieceTokenizer(unk_token="<unk>"), 200),
    "whole_words": lambda: trained(CharBPETokenizer(), 200),
    "no_decoder": lambda: trained(BertWordPieceTokenizer(unk_token="<unk>"), 200, decoder=False),  # names, with spaces
    "other_steps": lambda: trained(ByteLevelBPETokenizer(), 330, decoders.Sequence(OTHER_STEPS)),
    "sentence_piece": lambda: sentence_piece("unigram", vocab_size=73),
    "sentence_piece_bytes": lambda: sentence_piece("bpe", vocab_size=350, byte_fallback=True),
    "bytes": lambda: with_added_tokens(ByT5Tokenizer()),
    "mistral_common": lambda: mistral("tekken_240911.json"),
}


@functools.cache
def tokenizer_and_bytes(name):
    tokenizer = BUILDERS[name]()
    return tokenizer, TokenBytes(tokenizer)
