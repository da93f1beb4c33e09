"""What a step's counts depend on, and their form.

Every number is linear in the number of layers, so two small numbers of layers give all. FLOPs are a polynomial of degree 2 of a
sequence's length, so three lengths give all. Bytes are the peak of each part of a phase above those allocated when it starts,
gradients of an earlier micro-batch among them. FSDP1 counts like FSDP2. The importance pass is that of `fisher`, which needs as
much memory as the others or more, with one pooled row per response.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from oar_plugin.runs.plan.known import KNOWN


def dimensions(model: SimpleNamespace) -> str:
    """Return the keys of a planner's model that set the shapes of its config.json, besides the number of layers, as JSON."""
    keys = {*KNOWN["columns"], "head_dim"}
    values = {key: getattr(model, key) for key in keys - {"num_hidden_layers"}}
    return json.dumps({key: value for key, value in values.items() if value}, sort_keys=True)


def at(powers: Sequence[Sequence[float]], layers: int, length: float = 0.0) -> float:
    """Return a count: a polynomial of the length, with coefficients without any layer, and those of each layer."""
    return sum((a + b * layers) * length**power for power, (a, b) in enumerate(zip(*powers, strict=True)))


@dataclass(frozen=True)
class Work:
    """What FLOPs depend on, besides layers and length."""

    model: str  # `dimensions` of a planner's model
    recompute: bool = True  # activation checkpointing, layer by layer
    # A recomputation runs to the layer's end (Megatron); torch's stops at the last kept tensor.
    whole_layers: bool = False
    lora_rank: int = 0


@dataclass(frozen=True)
class Memory:
    """What the bytes and collectives of an FSDP rank depend on, besides layers."""

    model: str  # `dimensions` of a planner's model
    tokens: int  # of one rank's micro-batch
    weights: Literal["fp32", "bf16"] = "fp32"  # stored weights and their gradients
    element: Literal["fp32", "bf16"] = "bf16"  # arithmetic and activations
    recompute: bool = True
    fused: bool = False  # verl's fused kernels, which make no logits
    entropy_rows: int = 2048  # rows of logits per chunk of the entropy; 0: all at once, compiled
    lora_rank: int = 0
    shards: int = 8  # ranks that share one copy of the weights


Polynomial = tuple[list[float], list[float]]
"""Coefficients of the powers of a length: those without any layer, and those of each layer."""

Counts = dict[str, dict[str, Polynomial]]
"""Section -> name -> polynomial. Phases are "log-probs", "importance" (instead of "log-probs", for rows that are scored) and
"update".

Of `Work`: "parameters" ("all", "experts", "embedding", "trained"); "flops" of one sequence, by phase, and of the forwards of
"layers" and "head" (the projection).
Of `Memory`: "collectives" and "sent" by phase, their number and the bytes of the whole tensors, of one micro-batch. And each
phase: bytes in its parts, "first layer" (forward or backward; FSDP has gathered the embedding), "forward" and "backward" (of
other layers), "logits" (from the projection to the end of its backward), "optimizer" (its step). The peak is their maximum.
"""
