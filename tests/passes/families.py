"""A tokenizer of each family, trained here on a few sentences."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
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


def trained(backend, trainer, change=None):
    """A tokenizer from a backend, with two added tokens that are not special; `change` comes after the training."""
    backend.train_from_iterator(SENTENCES * 3, trainer)
    if change is not None:
        change(backend)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<答案>", special=False)])
    names = {"unk_token": "<unk>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def byte_level(*steps):
    """`steps`: of the decoder."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([*steps]) if steps else decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(backend, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, **COMMON))


def gguf():
    """Transformers decodes a GGUF file's byte-level BPE so. A name that is not of bytes would show the others' names."""
    steps = decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()
    return byte_level(*steps)


def whole_words():
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder("</w>")
    return trained(backend, trainers.BpeTrainer(vocab_size=200, end_of_word_suffix="</w>", **COMMON))


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


def unigram_metaspace(prepend="always"):
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return trained(backend, trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", **COMMON))


def word_piece(decoded=True):
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if decoded:  # else names are joined by spaces
        backend.decoder = decoders.WordPiece()
    return trained(backend, trainers.WordPieceTrainer(vocab_size=200, **COMMON))


def with_added_tokens(tokenizer):
    """For tokenizers in pure Python."""
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<答案>", special=False)])
    return tokenizer


def sentence_piece(kind, **options):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        with path.open("wb") as model:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(SENTENCES * 3), model_writer=model, model_type=kind, minloglevel=2, **options
            )
        names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<|pad|>"}
        return with_added_tokens(SentencePieceBackend(vocab_file=str(path), **names))


def mistral(name):
    """From a file inside of mistral_common."""
    import mistral_common
    from transformers import MistralCommonBackend

    return MistralCommonBackend(Path(mistral_common.__file__).parent / "data" / name)


BUILDERS = {
    "byte_level": byte_level,
    "gguf": gguf,
    "llama_2": lambda: byte_fallback_bpe(strip=True),
    "gemma": lambda: byte_fallback_bpe(strip=False),
    "unigram": unigram_metaspace,
    "no_first_space": lambda: unigram_metaspace("never"),
    "word_piece": word_piece,
    "whole_words": whole_words,
    "no_decoder": lambda: word_piece(decoded=False),
    "other_steps": lambda: byte_level(decoders.ByteLevel(), decoders.Replace(Regex("x{9}"), "")),
    "sentence_piece": lambda: sentence_piece("unigram", vocab_size=73),
    "sentence_piece_bytes": lambda: sentence_piece("bpe", vocab_size=350, byte_fallback=True),
    "bytes": lambda: with_added_tokens(ByT5Tokenizer()),
    "mistral_common": lambda: mistral("tekken_240911.json"),
}


@functools.cache
def tokenizer_and_bytes(name):
    tokenizer = BUILDERS[name]()
    return tokenizer, TokenBytes(tokenizer)
