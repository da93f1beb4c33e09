"""What a training step costs, counted on tensors without data: FLOPs of a model, bytes and collectives of an FSDP rank.

`counts(key)` runs the host's forward and update and the package's own gradient pass (`oar_plugin.passes`) on HuggingFace's
model class with fake tensors: no GPU, no weights (`fake_step.py`). Every number is linear in the number of layers, so two small
numbers of layers give all. FLOPs are a polynomial of degree 2 of a sequence's length, so three lengths give all. Counts in
`counts.json` come with the package; others are counted once and kept in the user's cache folder.

* FLOPs are those of PyTorch's `torch.utils.flop_counter`, matrix products and attention only. Attention counts half of the
  products, because flash attention skips what the causal mask hides.
* Bytes are the peak of each part of a phase above the bytes that are allocated when the phase starts. Gradients of an earlier
  micro-batch are among those: from the second micro-batch on, a new gradient is added to them. FSDP1 counts like FSDP2.
* The importance pass is that of `fisher`, which needs as much memory as the others or more. It has one pooled row per response.
* Not counted: Megatron's bytes (`costs.py` has formulas), kernels' workspace, the allocator's fragmentation, NCCL's buffers,
  masked copies (the FLOPs of "layers" give them), and rollout engines.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from oar_plugin.output import say
from oar_plugin.runs.plan.models import PlanError

PACKAGE = Path(__file__).parents[2]
SHIPPED = Path(__file__).parent / "counts.json"
DIMENSIONS = (  # noqa: SIM905
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
    "tie_word_embeddings attention_bias mlp_bias num_experts num_experts_per_tok moe_intermediate_size"
).split()


class NotCountedError(PlanError):
    """The shape is not among the shipped counts, and cannot be counted here. The message says why."""


def dimensions(config: Mapping[str, Any]) -> str:
    """Return the keys of a config.json that a count depends on, as JSON. The number of layers is not among them."""
    given = {name: config[name] for name in DIMENSIONS if config.get(name) not in (None, 0, False)}
    return json.dumps(given, sort_keys=True)


@dataclass(frozen=True)
class Work:
    """What FLOPs depend on, besides layers and length."""

    model: str  # `dimensions`
    recompute: bool = True  # activation checkpointing, layer by layer
    whole_layers: bool = (
        False  # a recomputation runs to the layer's end (Megatron); torch's stops at the last kept tensor
    )
    lora_rank: int = 0


@dataclass(frozen=True)
class Memory:
    """What the bytes and collectives of an FSDP rank depend on, besides layers."""

    model: str  # `dimensions`
    tokens: int  # of one rank's micro-batch
    weights: Literal["fp32", "bf16"] = "fp32"  # stored weights and their gradients
    element: Literal["fp32", "bf16"] = "bf16"  # arithmetic and activations
    recompute: bool = True
    fused: bool = False  # verl's fused kernels, which make no logits
    entropy_rows: int = 2048  # rows of logits per chunk of the entropy; 0: all at once, compiled
    lora_rank: int = 0
    shards: int = 8  # ranks that share one copy of the weights


class Polynomial(NamedTuple):
    """Coefficients of the powers of a length: those without any layer, and those of each layer."""

    base: tuple[float, ...]
    layer: tuple[float, ...]

    def at(self, layers: float, length: float = 0.0) -> float:
        return sum((a + b * layers) * length**power for power, (a, b) in enumerate(zip(*self, strict=True)))


Counts = dict[str, dict[str, Polynomial]]
"""Section -> name -> polynomial. Phases are "log-probs", "importance" (instead of "log-probs", for rows that are scored) and
"update".

Of `Work`, for the whole model:
* "parameters": "all", "experts", "embedding", "trained".
* "flops": by phase, of one sequence of that length; and the forwards of "layers" and "head" (the projection).
Of `Memory`:
* "collectives" and "sent": by phase, their number and the bytes of the whole tensors, of one micro-batch.
* A phase: bytes in its parts: "first layer" (forward or backward; FSDP has gathered the embedding), "forward" and "backward"
  (of other layers), "logits" (from the projection to the end of its backward), "optimizer" (its step, after the update). The
  peak is their maximum.
"""


@cache
def counts(key: Work | Memory) -> Counts:
    """Return the counts of `key`: shipped, from the cache, or counted now, which takes some seconds.

    Raises:
        NotCountedError: they must be counted, and cannot be here.
    """
    if (name := name_of(key)) in (shipped := _shipped()):
        return parsed(shipped[name])
    # A change of the passes or of a library can change the counts.
    source = (file.read_bytes() for part in ("passes", "runs/plan") for file in sorted((PACKAGE / part).glob("*.py")))
    made_by = hashlib.sha256(b"".join([name.encode(), *(_version(one).encode() for one in LIBRARIES), *source]))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "oar_plugin" / "counts"
    file = folder / f"{made_by.hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # no cache, or a broken one
        return parsed(json.loads(file.read_text(encoding="utf-8")))
    say("counting a step of this model on tensors without data, once: some seconds", sys.stderr)
    try:
        from oar_plugin.runs.plan.fake_step import count

        counted = count(key)
    except Exception as error:
        needs = "it takes torch, transformers, and peft for LoRA, and no process group may exist"
        raise NotCountedError(f"this model's step cannot be counted here ({needs}): {error}") from error
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(counted), encoding="utf-8")
        part.replace(file)
    return counted


LIBRARIES = "torch", "transformers", "peft", "verl"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def name_of(key: Work | Memory) -> str:
    """Return the name of a count in files."""
    return hashlib.sha256(f"{type(key).__name__} {json.dumps(asdict(key), sort_keys=True)}".encode()).hexdigest()[:16]


def parsed(values: Mapping[str, Mapping[str, Any]]) -> Counts:
    return {
        section: {name: Polynomial(*map(tuple, parts)) for name, parts in of.items()} for section, of in values.items()
    }


@cache
def _shipped() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return values
