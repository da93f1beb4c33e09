"""The model and the batch that are measured: random weights, synthetic responses, nothing downloaded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from oar_plugin.passes.tokens import TokenBytes

Architecture = Literal["qwen2", "llama"]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder; vocabulary and context come from the command line."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    tied: bool = True
    vocab: int = 32_000


# With tied embeddings of 32k tokens unless said otherwise; from 0.5b on, the shapes of Qwen2.5.
SHAPES: dict[str, Shape] = {
    "tiny": Shape(64, 128, 2, 4, 2, vocab=1024),
    # Heads of 32, the smallest that vLLM serves on a CPU.
    "1m": Shape(128, 352, 4, 4, 2, vocab=4096),
    "10m": Shape(256, 704, 4, 4, 2),
    "50m": Shape(512, 1408, 12, 8, 2),
    "0.1b": Shape(768, 2048, 12, 12, 4),
    "0.5b": Shape(896, 4864, 24, 14, 2),
    "1.5b": Shape(1536, 8960, 28, 12, 2),
    "7b": Shape(3584, 18944, 28, 28, 4, tied=False, vocab=152_064),
}


def build_model(
    size: str, architecture: Architecture, vocab: int, context: int, dtype: torch.dtype, device: torch.device, seed: int
) -> nn.Module:
    """A causal LM with random weights.

    Args:
        size: a key of `SHAPES`.
        architecture: `qwen2` or `llama`.
        vocab: size of the vocabulary.
        context: longest sequence.
        dtype: of the weights and of the computation.
        device: where it is built.
        seed: of the weights.
    """
    return build_shape(SHAPES[size], architecture, vocab, context, dtype, device, seed)


def build_shape(
    shape: Shape,
    architecture: Architecture,
    vocab: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> nn.Module:
    """A causal LM of any shape; see `build_model`."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=context,
        tie_word_embeddings=shape.tied,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, like Qwen's and Llama 3's, trained offline on arithmetic prose; a vocabulary of 1024 at most."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=1,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    source = random.Random(0)
    core.train_from_iterator((_sentence(source) for _ in range(500)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False)


def _sentence(source: random.Random) -> str:
    a, b = source.randrange(1000), source.randrange(1000)
    return source.choice(
        (
            f"So we add {a} and {b}, which gives {a + b}. ",
            f"First, note that ${a} \\times {b} = {a * b}$.\n",
            f"Therefore the remaining part is {a} - {b} = {a - b}; let us check it again. ",
            f"Each of the {a} boxes holds \\frac{{{a}}}{{{b + 1}}} of the total, so the sum is {a + b}.\n",
        )
    )


@dataclass(frozen=True)
class Batch:
    """Sequences of one length: prompt, reasoning, `\\boxed{`, answer, `}` and an end-of-sequence token.

    Attributes:
        token_BL: int64 token ids, prompt and response.
        answer_BL: bool, the planted answer's tokens.
        prompt_length: tokens before the response.
        token_bytes: the tokenizer, as the answer finder uses it.
        scored: how many sequences (the first ones) are to get importance.
    """

    token_BL: Tensor
    answer_BL: Tensor
    prompt_length: int
    token_bytes: TokenBytes
    scored: int

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
    tokenizer: Any = None,
) -> Batch:
    """Synthetic responses with an answer planted as tokens, so that its length is exact.

    `tokenizer`: of the model, when it is not one of `build_model`.
    """
    tokenizer = tokenizer or build_tokenizer()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    source = random.Random(seed)
    opening, closing = encode("\\boxed{"), encode("}")
    digits = [encode(digit)[0] for digit in "123456789"]
    reasoning_length = response_length - len(opening) - answer_length - len(closing) - 1
    if reasoning_length < 1:
        raise ValueError(f"a response of {response_length} tokens has no room for an answer of {answer_length}")
    rows, answers = [], []
    for _ in range(responses):
        text: list[int] = []
        while len(text) < prompt_length + reasoning_length:
            text += encode(_sentence(source))
        text = text[: prompt_length + reasoning_length]
        answer = source.choices(digits, k=answer_length)
        rows.append([*text, *opening, *answer, *closing, tokenizer.eos_token_id])
        start = len(text) + len(opening)
        answers.append([start <= place < start + answer_length for place in range(len(rows[-1]))])
    return Batch(
        torch.tensor(rows, device=device),
        torch.tensor(answers, device=device),
        prompt_length,
        TokenBytes(tokenizer),
        scored,
    )
