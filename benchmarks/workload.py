"""What `offload` and `scaling` measure on, and the options for it: a model with random weights and its responses."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.tiny.model import CPU, SHAPES, model_of
from benchmarks.tiny.words import WORDS, make_tokenizer
from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import importance_of, without_contexts, without_copies
from oar_plugin.passes.tokens import TokenBytes

DEFAULT: str = OarConfig.model_fields["importance"].default


@dataclass(frozen=True)
class Batch:
    """Sequences of one length: prompt, reasoning, `\\boxed{`, answer, `}` and an end-of-sequence token."""

    token_BL: Tensor  # int64 ids, prompt and response
    prompt_length: int
    token_bytes: TokenBytes
    scored: int  # how many sequences (the first ones) are to get importance

    def __len__(self) -> int:
        return self.token_BL.shape[0]


@dataclass(frozen=True)
class Workload:
    """Options of a command; a subclass that gives a field another default keeps its help."""

    sizes: ClassVar[Sequence[str]] = tuple(SHAPES)
    size: str = "0.1b"
    """Parameters of the model, about: tiny, 1m, 10m, 50m, 0.1b, 0.5b, 1.5b, 7b; its weights are random."""
    responses: int = 64
    """Sequences."""
    prompt_length: int = 128
    """Tokens before each response."""
    answer_length: int = 8
    """Tokens in the box."""
    rounds: int = 6
    """Counted rounds, after a warm-up; verdicts need six."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        check_at_least_one(self)
        check_size(self.size, self.sizes)

    def model(self, longest: int, device: torch.device = CPU) -> PreTrainedModel:
        """qwen2, for sequences of at most that many tokens."""
        return model_of(SHAPES[self.size], longest, getattr(torch, self.dtype), device)

    def batch(
        self,
        response_length: int,
        scored: int | None = None,
        device: torch.device = CPU,
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> Batch:
        """Synthetic responses, of which the first `scored` are to get importance (None: all).

        The answer is planted as tokens, so that its length is exact. `tokenizer`: of a model that is not `model`.
        """
        tokenizer = tokenizer or make_tokenizer(SHAPES["tiny"].vocab, by_bytes=True)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        source = random.Random(0)
        opening, closing = encode("\\boxed{"), encode("}")
        digits = [encode(digit)[-1] for digit in "123456789"]
        text_length = self.prompt_length + response_length - len(opening) - self.answer_length - len(closing) - 1
        if text_length <= self.prompt_length:
            told = f"a response of {response_length} tokens has no room for an answer of {self.answer_length}"
            raise ValueError(told)
        rows = []
        for _ in range(self.responses):
            text = encode(" ".join(source.choices(WORDS, k=text_length)))[:text_length]  # a word is at least one token
            answer = source.choices(digits, k=self.answer_length)
            rows.append([*text, *opening, *answer, *closing, tokenizer.eos_token_id])
        token_BL = torch.tensor(rows, device=device)
        return Batch(token_BL, self.prompt_length, TokenBytes(tokenizer), scored or self.responses)


@dataclass(frozen=True)
class ScoredWorkload(Workload):
    """With one importance, in passes over micro-batches."""

    response_length: int = 512
    """Tokens of each response."""
    micro_batch: int = 4
    """Sequences at a time."""
    scored_share: float = 1.0
    """Share of the responses that get importance: those whose group has a non-zero advantage."""
    importance: str = DEFAULT
    """Any without masked copies, or python:MODULE:CLASS."""

    def check(self) -> None:
        super().check()
        if not 0 < self.scored_share <= 1:
            raise ValueError(f"--scored-share {self.scored_share}: must be in (0, 1]")
        check_importance(self.importance)

    @property
    def scored(self) -> int:
        """How many responses get importance."""
        return max(1, round(self.responses * self.scored_share))


def check_at_least_one(settings: Any, *names: str) -> None:
    """Raises: ValueError, with the option, where a field is below 1: one of `names`, or without them any whole number."""
    for name in names or [field.name for field in fields(settings)]:
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) is int and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: must be at least 1")


def check_size(size: str, allowed: Sequence[str]) -> None:
    """Raises: ValueError, when it is not one of them."""
    if size not in allowed:
        raise ValueError(f"--size {size}: allowed: {', '.join(allowed)}")


def check_importance(name: str, copies: bool = False) -> None:
    """Raises: ValueError, when `--importance NAME` is unknown, or runs masked copies where they are not measured."""
    try:
        importance = importance_of(name)
    except ValueError as error:
        raise ValueError(f"--importance {name}: {error}") from None
    if importance.contexts:
        raise ValueError(
            f"--importance {name}: it shows right answers, which this study lacks; allowed: {without_contexts()}"
        )
    if importance.copies is not None and not copies:
        raise ValueError(f"--importance {name}: it runs masked copies, not measured here; allowed: {without_copies()}")


def model_line(size: str, parameters: int, dtype: str) -> str:
    """What a page says of a model with random weights."""
    vocab = SHAPES[size].vocab
    return f"qwen2 with random weights, {parameters / 1e6:.1f}M parameters (tied embeddings once), vocabulary {vocab}, {dtype}"
