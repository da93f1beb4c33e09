"""Layouts of processes, what the processes of each are told, and where their results are."""

import json
import math
import random
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.tiny.model import CPU, SHAPES, model_of
from benchmarks.tiny.words import WORDS
from benchmarks.workload import DEFAULT, check_at_least_one, check_importance, check_size

Kind = Literal["data", "tensor", "pipeline", "sequence", "context"]

DIVISIONS = {"fsdp": ("data", "sequence"), "megatron": ("data", "tensor", "pipeline", "context")}

FAILED = "benchmarks scaling failed:"
"""What a worker's line that gives the reason begins with."""


@dataclass(frozen=True)
class Work:
    """What every process of a launch is told."""

    size: str = "10m"
    """Parameters of the model, about: tiny, 1m, 10m, 50m, 0.1b, 0.5b, 1.5b, 7b; its weights are random."""
    model: str | None = None
    """Folder of a Hugging Face model with its tokenizer instead, at the same path on every node."""
    responses: int = 16
    """Sequences: of each data-parallel rank when weak, of all ranks together when strong."""
    prompt_length: int = 32
    """Tokens before each response."""
    response_length: int = 128
    """Tokens of each response."""
    answer_length: int = 8
    """Tokens in the box."""
    micro_batch: int = 2
    """Sequences at a time."""
    checkpointing: bool = False
    """Recompute activations in every backward."""
    scored_share: float = 1.0
    """Share of the responses that get importance: those whose group has a non-zero advantage."""
    importance: str = DEFAULT
    """Any without masked copies, or python:MODULE:CLASS."""
    rounds: int = 7
    """Counted rounds, after a warm-up; verdicts need six."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation; on GPUs Megatron takes bfloat16 only."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        check_at_least_one(self)
        check_size(self.size, tuple(SHAPES))
        if not 0 < self.scored_share <= 1:
            raise ValueError(f"--scored-share {self.scored_share}: must be in (0, 1]")
        check_importance(self.importance)

    @property
    def scored(self) -> int:
        """How many responses get importance."""
        return max(1, round(self.responses * self.scored_share))

    def make_model(self, device: torch.device = CPU) -> PreTrainedModel:
        """qwen2 with random weights, for as long sequences as there will be."""
        longest = self.prompt_length + self.response_length
        return model_of(SHAPES[self.size], longest, getattr(torch, self.dtype), device)

    def token_BL(self, tokenizer: PreTrainedTokenizerFast) -> Tensor:
        """Sequences of one length: prompt, reasoning, `\\boxed{`, answer, `}` and an end-of-sequence token.

        The answer is planted as tokens, so that its length is exact.
        """
        encode = partial(tokenizer.encode, add_special_tokens=False)
        source = random.Random(0)
        opening, closing = encode("\\boxed{"), encode("}")
        digits = [encode(digit)[-1] for digit in "123456789"]
        length = self.prompt_length + self.response_length - len(opening) - self.answer_length - len(closing) - 1
        if length <= self.prompt_length:
            told = f"a response of {self.response_length} tokens has no room for an answer of {self.answer_length}"
            raise ValueError(told)
        rows = []
        for _ in range(self.responses):
            text = encode(" ".join(source.choices(WORDS, k=length)))[:length]  # a word is at least one token
            answer = source.choices(digits, k=self.answer_length)
            rows.append([*text, *opening, *answer, *closing, tokenizer.eos_token_id])
        return torch.tensor(rows)


@dataclass(frozen=True)
class Layout:
    """Sizes of the kinds of parallelism in one launch, whose product is the number of processes.

    `fsdp` is verl's FSDP2 engine, whose `sequence` is Ulysses; `megatron` its Megatron engine, with sequence parallelism where
    `tensor` is above 1.
    """

    engine: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in vars(self).items() if name != "engine"}

    @property
    def processes(self) -> int:
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1)
        return f"{self.engine}:{sizes}".rstrip(":")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The inverse of `str`. Raises: ValueError, where it cannot be read."""
        engine, _, rest = text.partition(":")
        sizes = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        names = DIVISIONS.get(engine, ())
        if not names or not all(name in names and size.isdigit() and int(size) for name, size in sizes.items()):
            raise ValueError(
                f"--layout {text}: allowed are fsdp:data=N,sequence=N and megatron:data=N,tensor=N,pipeline=N,context=N, "
                "with the sizes that are not 1"
            )
        return cls(engine, **{name: int(size) for name, size in sizes.items()})


@dataclass(frozen=True)
class Launch:
    """One thing to measure: a layout, and what its processes are told, with the responses of the whole batch."""

    layout: Layout
    work: Work

    def __str__(self) -> str:
        return f"{self.layout}, {self.work.responses} responses"

    def told(self) -> dict[str, Any]:
        return {"layout": str(self.layout)} | {field.name: getattr(self.work, field.name) for field in fields(Work)}

    def argument(self, runs: Path) -> str:
        """All that the worker is given, in JSON."""
        return json.dumps(self.told() | {"runs": str(runs.resolve())})

    def file(self, runs: Path) -> Path:
        """Where its result goes."""
        name = str(self.layout).translate(str.maketrans(":,", "__", "="))
        return runs / f"{name}_{self.work.responses}.json"

    def result(self, runs: Path) -> dict[str, Any]:
        """What `worker.run` wrote, here or on a cluster.

        Raises:
            RuntimeError: nothing, or something else.
        """
        path = self.file(runs)
        try:
            measured = dict(json.loads(path.read_text()))
            different = [name for name, value in self.told().items() if measured[name] != value and name != "rounds"]
        except FileNotFoundError:
            raise RuntimeError(f"no result: {path.name} is not there") from None
        except (KeyError, TypeError, ValueError) as error:
            raise RuntimeError(f"{path}: not a result of this study ({error!r})") from error
        if different:
            raise RuntimeError(f"{path.name} was measured with other arguments: {', '.join(different)}")
        return measured
