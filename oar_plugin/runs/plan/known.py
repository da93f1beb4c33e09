"""What the planner knows and assumes (`known.yaml`), counts of a step (`counts.json`), GPUs (`gpus.json`)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml

from oar_plugin.output import did_you_mean

KNOWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
COUNTS: dict[str, Any] = json.loads(Path(__file__).with_name("counts.json").read_text(encoding="utf-8"))
GIB = 2**30


class PlanError(ValueError):
    """The configuration cannot run on its GPUs."""


class NotPlannedError(PlanError):
    """It may run; the planner does not know its model, or the value of a key."""


class NotCountedError(NotPlannedError):
    """No counts are shipped. Its `args`: "Work" or "Memory" (`benchmarks/count/shapes.py`), the shape, its name."""

    def __str__(self) -> str:
        advice = "`python -m benchmarks count --recipe RECIPE key=value ...` in a checkout adds them"
        return f"the package has no counts of this model with these micro-batches; {advice}"


class Gpu(NamedTuple):
    """One GPU and its links, from the vendor's datasheet (RTX 4090: Ada whitepaper); nothing here was measured."""

    name: str
    memory_gib: float  # total memory as CUDA reports it, a little less than the label says
    tflops: float  # dense bf16 arithmetic, 1e12 FLOPs per second
    bandwidth: float  # memory bandwidth, 1e9 bytes per second
    link: float  # between two GPUs of a node, 1e9 bytes per second and direction
    network: float  # between nodes, 1e9 bytes per second and direction, one adapter per GPU


GPUS = {key: Gpu(*of) for key, of in json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8")).items()}


_columns = zip(*KNOWN["efficiency"].values(), strict=True)
EXPECTED, GOOD, POOR = (SimpleNamespace(**dict(zip(KNOWN["efficiency"], one, strict=True))) for one in _columns)
ASSUMED = SimpleNamespace(**KNOWN["assumed"])


def choose_gpu(name: str = "H100-80", memory_gib: float | None = None) -> Gpu:
    """Return the GPU called `name` (`h100` if one matches), with `memory_gib` if given. ValueError: unknown or ambiguous."""
    matches = [gpu for key, gpu in GPUS.items() if name.lower() in (key.lower(), key.split("-")[0].lower())]
    if len(matches) != 1:
        hint = "" if matches else did_you_mean(name.upper(), [*GPUS, *(key.split("-")[0] for key in GPUS)])
        raise ValueError(f"--gpu {name}: unknown or ambiguous; allowed: {', '.join(GPUS)}, with any --gpu-memory{hint}")
    return matches[0]._replace(memory_gib=memory_gib or matches[0].memory_gib)


def counts(kind: str, shape: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return section -> name -> coefficients, the arguments of `at`. Raise NotCountedError if none are shipped."""
    name = hashlib.sha256(f"{kind} {json.dumps(shape, sort_keys=True)}".encode()).hexdigest()[:16]
    if name not in COUNTS:
        raise NotCountedError(kind, shape, name)
    return COUNTS[name]


def at(powers: Sequence[Sequence[float]], layers: int, length: float = 0.0) -> float:
    """Return a count: a polynomial of the length, with coefficients without any layer, and those of each layer."""
    return sum((a + b * layers) * length**power for power, (a, b) in enumerate(zip(*powers, strict=True)))


def load_model(name: str) -> SimpleNamespace:
    """Return the sizes of a known model, as its config.json names them, and `dimensions`, of which counts depend."""
    words = name.rstrip("/").split("/")[-1].removeprefix("Meta-").split("-")
    if (short := "-".join(word for word in words if word not in KNOWN["variants"])) not in KNOWN["models"]:
        known = ", ".join(KNOWN["models"])
        raise NotPlannedError(f"actor_rollout_ref.model.path={name}; its last part must be one of {known}")
    values = dict(zip(KNOWN["columns"], KNOWN["models"][short], strict=True))
    values |= KNOWN["families"][values["model_type"]]
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    counted = {key: value for key, value in values.items() if value and key != "num_hidden_layers"}
    # Width of the MLP; in a mixture of experts, the summed width of one token's experts.
    inner = values["num_experts_per_tok"] * values["moe_intermediate_size"] or values["intermediate_size"]
    return SimpleNamespace(name=name, inner=inner, dimensions=json.dumps(counted, sort_keys=True), **values)
