"""What is measured: layouts of processes, the work of each, and which of them are compared with which."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig

from benchmarks.importance import DEFAULT, check_importance
from benchmarks.study import check_at_least_one
from benchmarks.tiny.random_models import SHAPES, Shape

Kind = Literal["data", "tensor", "pipeline", "sequence", "context"]
Mode = Literal["weak", "strong"]

DIVISIONS = {"fsdp": ("data", "sequence"), "megatron": ("data", "tensor", "pipeline", "context")}


@dataclass(frozen=True)
class Work:
    """What every process of a launch is told."""

    size: str = "10m"
    """Parameters of the model, about: tiny, 1m, 10m, 50m, 0.1b, 0.5b, 1.5b, 7b; its weights are random."""
    model: str | None = None
    """Folder of a Hugging Face model with its tokenizer instead, at the same path on every node."""
    responses: int = 16
    """Sequences: of each data-parallel rank when weak, of all ranks together when strong."""
    response_length: int = 128
    """Tokens of each response."""
    prompt_length: int = 32
    """Tokens before it."""
    answer_length: int = 8
    """Tokens in the box."""
    micro_batch: int = 2
    """Sequences at a time on a rank."""
    scored_share: float = 1.0
    """Share of the responses that get importance: those whose group has a non-zero advantage."""
    importance: str = DEFAULT
    """Any without masked copies, or python:MODULE:CLASS."""
    checkpointing: bool = False
    """Recompute activations in every backward."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation; on GPUs Megatron takes bfloat16 only."""
    rounds: int = 7
    """Counted rounds, after a warm-up."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        lengths = ("response_length", "prompt_length", "answer_length")
        check_at_least_one(self, "responses", *lengths, "micro_batch", "rounds")
        check_importance(self.importance)
        if not 0 < self.scored_share <= 1:
            raise ValueError(f"--scored-share {self.scored_share}: must be in (0, 1]")
        if self.size not in SHAPES:
            raise ValueError(f"--size {self.size}: allowed: {', '.join(SHAPES)}")
        self.shape()

    def shape(self) -> Shape:
        if self.model is None:
            return SHAPES[self.size]
        try:
            config = AutoConfig.from_pretrained(self.model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {self.model}: must be a folder with a Hugging Face model: {error}") from error
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        return Shape(config.hidden_size, config.intermediate_size, config.num_hidden_layers, *heads)


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
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    @property
    def processes(self) -> int:
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1)
        return f"{self.engine}:{sizes}".rstrip(":")

    @classmethod
    def parse(cls, text: str) -> Layout:
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
    """One thing to measure: a layout, and the responses of the whole batch, over all data-parallel ranks."""

    layout: Layout
    responses: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.responses} responses"

    def argument(self, work: Work, runs: Path) -> str:
        """The worker's only argument: what it is told, in JSON, without what is the default."""
        default = asdict(Work())
        told = {name: value for name, value in asdict(work).items() if name in default and value != default[name]}
        told |= {"layout": str(self.layout), "responses": self.responses, "runs": str(runs.resolve())}
        return json.dumps(told)

    def problem(self, work: Work) -> str | None:
        """Why this layout cannot run that model and batch, in a sentence; None when it can."""
        layout, shape, per_rank = self.layout, work.shape(), self.responses // self.layout.data
        if self.responses % layout.data:
            return f"{self.responses} responses cannot be shared evenly among data={layout.data} ranks"
        if layout.engine == "megatron" and per_rank % min(work.micro_batch, per_rank):
            return f"{per_rank} responses a rank are not a multiple of --micro-batch {work.micro_batch}"
        for name, size in (("tensor", layout.tensor), ("sequence", layout.sequence)):
            if shape.heads % size:
                return f"the model's {shape.heads} attention heads cannot be shared among {name}={size} ranks"
        if max(shape.key_value_heads, layout.tensor) % min(shape.key_value_heads, layout.tensor):
            return f"the model's {shape.key_value_heads} key-value heads do not go with tensor={layout.tensor}"
        if shape.layers % layout.pipeline:
            return f"the model's {shape.layers} layers cannot be shared evenly among pipeline={layout.pipeline} stages"
        return None

    def file(self, runs: Path) -> Path:
        """Where its result goes."""
        return runs / f"{str(self.layout).replace(':', '_').replace(',', '_').replace('=', '')}_{self.responses}.json"

    def result(self, work: Work, runs: Path) -> dict[str, Any]:
        """What `worker.run` wrote, here or on a cluster.

        Raises:
            RuntimeError: nothing, or something else.
        """
        path = self.file(runs)
        try:
            measured = json.loads(path.read_text())
            asked = {**asdict(work), "responses": self.responses, "rounds": measured["rounds"]}
            different = [field.name for field in fields(Work) if measured[field.name] != asked[field.name]]
        except FileNotFoundError:
            raise RuntimeError(f"no result: {path.name} is not there") from None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise RuntimeError(f"{path}: not a result of this study ({error!r})") from error
        if different:
            raise RuntimeError(f"{path.name} was measured with other arguments: {', '.join(different)}")
        return dict(measured)


def plan_series(
    responses: int, kinds: Sequence[Kind], modes: Sequence[Mode], processes: Sequence[int], layouts: Sequence[Layout]
) -> dict[str, list[Launch]]:
    """Each kind at each number of processes, and the given layouts as a series of their own.

    Only layouts with data parallelism have two modes, `weak`, where the batch grows with the data-parallel size, and `strong`,
    where it stays. The other kinds share the work of one response, and their batch is the same at every size.
    """
    groups: dict[str, list[Layout]] = {"layouts": list(layouts)} if layouts else {}
    for kind in kinds:
        engine = next(engine for engine, names in DIVISIONS.items() if kind in names)
        groups[kind] = [Layout(engine, **{kind: size}) for size in sorted(set(processes))]
    series: dict[str, list[Launch]] = {}
    for name, group in groups.items():
        if all(layout.data == group[0].data for layout in group):
            series[name] = [Launch(layout, responses) for layout in group]
            continue
        for mode in modes:
            launches = [Launch(layout, responses * layout.data if mode == "weak" else responses) for layout in group]
            series[f"{name}, {mode}"] = launches
    return series
