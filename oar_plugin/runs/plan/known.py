"""What the planner knows without a network: models and numbers of rows (`known.yaml`), counts of a step (`counts.json`)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

KNOWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
COUNTS: dict[str, Any] = json.loads(Path(__file__).with_name("counts.json").read_text(encoding="utf-8"))


class PlanError(ValueError):
    """The configuration cannot run on its GPUs."""


class NotPlannedError(PlanError):
    """It may run; the planner does not know its model, or the value of a key."""


class NotCountedError(NotPlannedError):
    """No counts of a `shape` are shipped; `kind` is "Work" or "Memory", which `benchmarks/count/shapes.py` defines."""

    def __init__(self, kind: str, shape: Mapping[str, Any]) -> None:
        advice = "`python -m benchmarks count --recipe RECIPE key=value ...` in a checkout adds them"
        super().__init__(f"the package has no counts of this model with these micro-batches; {advice}")
        self.kind, self.shape = kind, shape


def counts(kind: str, shape: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return section -> name -> coefficients, the arguments of `at`. Raise NotCountedError if none are shipped."""
    if (name := name_of(kind, shape)) not in COUNTS:
        raise NotCountedError(kind, shape)
    return COUNTS[name]


def at(powers: Sequence[Sequence[float]], layers: int, length: float = 0.0) -> float:
    """Return a count: a polynomial of the length, with coefficients without any layer, and those of each layer."""
    return sum((a + b * layers) * length**power for power, (a, b) in enumerate(zip(*powers, strict=True)))


def name_of(kind: str, shape: Mapping[str, Any]) -> str:
    """Return the name of a shape's counts in `counts.json`."""
    return hashlib.sha256(f"{kind} {json.dumps(shape, sort_keys=True)}".encode()).hexdigest()[:16]


@cache
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
