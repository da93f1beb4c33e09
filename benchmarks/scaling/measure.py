"""What `oar bench scaling` runs: layouts of processes, the batch of each, and which of them are compared with which.

A *layout* says how many processes share what. A *series* is one kind of layout at growing sizes, and its first member, one
process where the model fits in one, is what the others are held against. Nothing here starts anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.importance import DEFAULT, check_importance
from benchmarks.machine import Device

Engine = Literal["fsdp", "megatron"]
Kind = Literal["data", "tensor", "pipeline", "sequence", "context"]
Mode = Literal["weak", "strong"]
Phase = Literal["log_prob", "gate", "update"]

KINDS: tuple[Kind, ...] = get_args(Kind)
MODES: tuple[Mode, ...] = get_args(Mode)
PHASES: tuple[Phase, ...] = get_args(Phase)
ENGINE_OF: dict[Kind, Engine] = {
    "data": "fsdp",
    "tensor": "megatron",
    "pipeline": "megatron",
    "sequence": "fsdp",
    "context": "megatron",
}
FAILED = "oar bench scaling failed:"
"""What a line of a worker that gives the reason begins with; the launcher looks for it."""

_DIVISIONS = {"fsdp": ("data", "sequence"), "megatron": ("data", "tensor", "pipeline", "context")}


@dataclass(frozen=True)
class Layout:
    """How the processes of one launch are laid out; the product of the sizes is their number.

    Attributes:
        engine: verl's FSDP2 engine, or its Megatron engine (with Megatron's sequence parallelism where `tensor` > 1).
        data: data-parallel size.
        tensor: tensor-parallel size (Megatron).
        pipeline: pipeline stages (Megatron).
        context: context-parallel size (Megatron).
        sequence: Ulysses size (FSDP).
    """

    engine: Engine
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence: int = 1

    def __str__(self) -> str:
        sizes = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) > 1]
        return f"{self.engine}:{','.join(sizes)}" if sizes else self.engine

    @property
    def processes(self) -> int:
        """How many it takes."""
        return math.prod(getattr(self, f.name) for f in fields(self)[1:])

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The inverse of `str`: `fsdp:data=4,sequence=2`, `megatron:tensor=4,pipeline=2,data=8`, `fsdp`.

        Raises:
            ValueError: it cannot be read.
        """
        engine, _, rest = text.partition(":")
        allowed = _DIVISIONS.get(engine, ())
        sizes: dict[str, int] = {}
        for part in filter(None, rest.split(",")):
            name, _, number = part.partition("=")
            if name not in allowed or not number.isdigit() or int(number) < 1:
                break
            sizes[name] = int(number)
        else:
            if allowed:
                return cls(engine, **sizes)  # type: ignore[arg-type]
        raise ValueError(
            f"--layout {text}: allowed are fsdp:data=N,sequence=N and megatron:data=N,tensor=N,pipeline=N,context=N, "
            "with the sizes that are not 1"
        )

    def problem(self, shape: ModelShape, settings: Settings, responses: int) -> str | None:
        """Why this layout cannot run that model and batch, in a sentence; None when it can."""
        if responses % self.data:
            return f"{responses} responses cannot be shared evenly among data={self.data} ranks"
        per_rank = responses // self.data
        if self.engine == "megatron" and per_rank % min(settings.micro_batch, per_rank):
            return f"{per_rank} responses a rank are not a multiple of --micro-batch {settings.micro_batch}"
        for name, size in (("tensor", self.tensor), ("sequence", self.sequence)):
            if shape.heads % size:
                return f"the model's {shape.heads} attention heads cannot be shared among {name}={size} ranks"
        if max(shape.key_value_heads, self.tensor) % min(shape.key_value_heads, self.tensor):
            return f"the model's {shape.key_value_heads} key-value heads do not go with tensor={self.tensor}"
        if shape.layers % self.pipeline:
            return f"the model's {shape.layers} layers cannot be shared evenly among pipeline={self.pipeline} stages"
        return None


@dataclass(frozen=True)
class ModelShape:
    """What of a model says whether a layout fits it."""

    layers: int
    heads: int
    key_value_heads: int

    @classmethod
    def of(cls, size: str, folder: Path | None) -> ModelShape:
        """Of a key of `SHAPES`, or of a model on disk.

        Raises:
            ValueError: the folder has no readable `config.json`.
        """
        if folder is None:
            from benchmarks.tiny.random_models import SHAPES

            shape = SHAPES[size]
            return cls(shape.layers, shape.heads, shape.key_value_heads)
        try:
            config = json.loads((folder / "config.json").read_text())
            heads = config["num_attention_heads"]
            return cls(config["num_hidden_layers"], heads, config.get("num_key_value_heads", heads))
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"--model {folder}: no config.json of a Hugging Face causal LM there ({error})") from error


@dataclass(frozen=True)
class Settings:
    """The arguments that every launch of a run shares; `vocab` is None for "of the size"."""

    size: str = "10m"
    model: str | None = None
    architecture: Literal["qwen2", "llama"] = "qwen2"
    vocab: int | None = None
    responses: int = 16
    response_length: int = 128
    prompt_length: int = 32
    answer_length: int = 8
    micro_batch: int = 2
    scored_share: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Device = "auto"
    checkpointing: bool = False
    importance: str = DEFAULT
    rounds: int = 7
    threads: int = 1
    seed: int = 0

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        for name in (
            "responses",
            "response_length",
            "prompt_length",
            "answer_length",
            "micro_batch",
            "rounds",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        check_importance(self.importance)
        if not 0 < self.scored_share <= 1:
            raise ValueError(f"--scored-share {self.scored_share}: must be in (0, 1]")
        if self.model is not None and not Path(self.model).is_dir():
            raise ValueError(
                f"--model {self.model}: no such folder; it must hold a Hugging Face model and its tokenizer"
            )


@dataclass(frozen=True)
class Launch:
    """One thing to measure: a layout with a batch.

    Attributes:
        layout: the processes.
        responses: of the whole batch, over all data-parallel ranks.
    """

    layout: Layout
    responses: int

    @property
    def name(self) -> str:
        return f"{str(self.layout).replace(':', '_').replace(',', '_').replace('=', '')}_{self.responses}"


@dataclass(frozen=True)
class Series:
    """Layouts of one kind at growing sizes.

    Attributes:
        name: for tables and plots.
        mode: weak: the batch grows with the data-parallel size. strong: it stays.
        launches: the first is what the others are compared with.
    """

    name: str
    mode: Mode
    launches: tuple[Launch, ...]

    @property
    def base(self) -> Launch:
        """What the others are compared with."""
        return self.launches[0]

    def ideal_seconds(self, launch: Launch, base_seconds: float) -> float:
        """Seconds of a step on `launch` if processes cost nothing but their share: for the efficiency."""
        work = launch.responses / self.base.responses
        return base_seconds * work * self.base.layout.processes / launch.layout.processes


def plan_series(
    settings: Settings,
    kinds: Sequence[Kind],
    modes: Sequence[Mode],
    processes: Sequence[int],
    layouts: Sequence[Layout] = (),
) -> list[Series]:
    """The series of a run.

    Only layouts with data parallelism have two modes: the other kinds share the work of one response, and their batch is the
    same at every size.

    Args:
        settings: the batch; `responses` is that of one data-parallel rank when it grows, else of all.
        kinds: what to scale.
        modes: for layouts with data parallelism.
        processes: sizes of each kind; the smallest is what the others are compared with.
        layouts: a series of its own, compared with the first of them.

    Raises:
        ValueError: a size below one.
    """
    if min(processes) < 1:
        raise ValueError(f"--processes {min(processes)}: must be at least 1")
    groups = [
        (str(kind), [Layout(ENGINE_OF[kind], **{kind: size}) for size in sorted(set(processes))]) for kind in kinds
    ]
    if layouts:
        groups.append(("layouts", list(layouts)))
    series: list[Series] = []
    for name, group in groups:
        scales_data = any(layout.data != group[0].data for layout in group)
        for mode in modes if scales_data else (MODES[1],):
            launches = tuple(launch_of(layout, settings, mode) for layout in group)
            series.append(Series(f"{name}, {mode}" if scales_data else name, mode, launches))
    return series


def launch_of(layout: Layout, settings: Settings, mode: Mode) -> Launch:
    """A layout with its batch."""
    return Launch(layout, settings.responses * (layout.data if mode == "weak" else 1))


def distinct(series: Sequence[Series]) -> list[Launch]:
    """Every launch once, small ones first."""
    launches = dict.fromkeys(launch for each in series for launch in each.launches)
    return sorted(launches, key=lambda launch: launch.layout.processes)


@dataclass
class Measured:
    """What one launch returned.

    Attributes:
        launch: what was measured.
        seconds: of `grpo` and `oar`, of each phase: a wall time a round, of the slowest process. `log_prob` of `oar` has
            importance in it; `gate` is of `oar` only and runs where verl's driver would.
        cpu_seconds: the same, processor seconds of all processes together.
        machine: where, from rank 0.
        scores: importance of the first response, before any update: it must not depend on the layout.
        parameters: of the model.
    """

    launch: Launch
    seconds: dict[str, dict[str, list[float]]]
    cpu_seconds: dict[str, dict[str, list[float]]]
    machine: dict[str, Any]
    scores: list[float]
    parameters: int

    def step(self, method: str, kind: Literal["seconds", "cpu_seconds"] = "seconds") -> list[float]:
        """Seconds of the whole step, a value a round."""
        phases = getattr(self, kind)[method].values()
        return [sum(values) for values in zip(*phases, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "launch"}
        return {"layout": str(self.launch.layout), "responses": self.launch.responses, **content}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Measured:
        names = [f.name for f in fields(cls) if f.name != "launch"]
        launch = Launch(Layout.parse(content["layout"]), content["responses"])
        return cls(launch, **{name: content[name] for name in names})


@dataclass(frozen=True)
class Failed:
    """A launch that gave no figures.

    Attributes:
        launch: what was to be measured.
        reason: in a line.
    """

    launch: Launch
    reason: str


def write(path: Path, settings: Settings, measured: Measured) -> None:
    """The result file of one launch: complete or not there at all."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"settings": asdict(settings), **measured.to_dict()}))
    partial.replace(path)


def read(path: Path) -> tuple[Settings, Measured]:
    """What `write` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        content = json.loads(path.read_text())
        return Settings(**content.pop("settings")), Measured.from_dict(content)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a result of oar bench scaling ({error})") from error
