"""Models of any size with random weights, and synthetic responses: what costs are measured on, nothing downloaded."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.tiny.words import WORDS, make_tokenizer
from oar_plugin.passes.tokens import TokenBytes

Architecture = Literal["qwen2", "llama", "qwen3_moe"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    tied: bool = True
    vocab: int = 32_000


# From 0.5b on, the shapes of Qwen2.5.
SHAPES: dict[str, Shape] = {
    "tiny": Shape(64, 128, 2, 4, 2, vocab=1024),
    "1m": Shape(128, 352, 4, 4, 2, vocab=4096),  # heads of 32, the smallest that vLLM serves on a CPU
    "10m": Shape(256, 704, 4, 4, 2),
    "50m": Shape(512, 1408, 12, 8, 2),
    "0.1b": Shape(768, 2048, 12, 12, 4),
    "0.5b": Shape(896, 4864, 24, 14, 2),
    "1.5b": Shape(1536, 8960, 28, 12, 2),
    "7b": Shape(3584, 18944, 28, 28, 4, tied=False, vocab=152_064),
}


def build_model(
    shape: Shape,
    context: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
    architecture: Architecture = "qwen2",
    **settings: Any,
) -> PreTrainedModel:
    """A causal LM for sequences of at most `context` tokens; `settings` go into its configuration."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=context,
        tie_word_embeddings=shape.tied,
        attention_dropout=0.0,
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **settings},
    )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


@dataclass(frozen=True)
class Batch:
    """Sequences of one length: prompt, reasoning, `\\boxed{`, answer, `}` and an end-of-sequence token."""

    token_BL: Tensor  # int64 ids, prompt and response
    answer_BL: Tensor  # bool, the planted answer's tokens
    prompt_length: int
    token_bytes: TokenBytes
    scored: int  # how many sequences (the first ones) are to get importance

    def __len__(self) -> int:
        return self.token_BL.shape[0]


def build_batch(
    responses: int,
    prompt_length: int,
    response_length: int,
    answer_length: int,
    scored: int,
    device: torch.device,
    seed: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Batch:
    """Synthetic responses with an answer planted as tokens, so that its length is exact.

    `tokenizer`: of the model, when it is not one of `build_model`.
    """
    tokenizer = tokenizer or make_tokenizer(SHAPES["tiny"].vocab, by_bytes=True)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    source = random.Random(seed)
    opening, closing = encode("\\boxed{"), encode("}")
    digits = [encode(digit)[-1] for digit in "123456789"]
    reasoning_length = response_length - len(opening) - answer_length - len(closing) - 1
    if reasoning_length < 1:
        raise ValueError(f"a response of {response_length} tokens has no room for an answer of {answer_length}")
    text_length, rows = prompt_length + reasoning_length, []
    for _ in range(responses):
        text = encode(" ".join(source.choices(WORDS, k=text_length)))[:text_length]  # a word is at least one token
        rows.append([*text, *opening, *source.choices(digits, k=answer_length), *closing, tokenizer.eos_token_id])
    token_BL = torch.tensor(rows, device=device)
    answer_BL = torch.zeros_like(token_BL, dtype=torch.bool)
    answer_BL[:, text_length + len(opening) :][:, :answer_length] = True
    return Batch(token_BL, answer_BL, prompt_length, TokenBytes(tokenizer), scored)
