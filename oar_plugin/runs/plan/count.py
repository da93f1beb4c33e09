"""What a training step costs one rank: parameters, FLOPs, bytes and collectives, counted on tensors without data.

`counts(key)` runs the host's forward and update and the product's own gradient pass (`oar_plugin.passes`) on HuggingFace's
model class with fake tensors: no GPU, no weights (`fake_step.py`). Every number is linear in the number of layers, so two small
numbers of layers give all. FLOPs are a polynomial of degree 2 of a sequence's length, so three lengths give all. Counts in
`counts.json` come with the package; others are counted once and kept in the user's cache.

* FLOPs are those of PyTorch's `torch.utils.flop_counter`, matrix products and attention only. Attention counts half of the
  products, because flash attention skips what the causal mask hides.
* Bytes are the peak of each moment above what lies there before the phase: weights, gradients and optimizer states ("states").
  Gradients of an earlier micro-batch are there: from the second micro-batch on, a new gradient is added to them.
* FSDP1 counts like FSDP2. Under Megatron the model is one rank's: heads, MLP, vocabulary and experts divided. Its fused kernels
  (norms, SwiGLU, cross entropy) are stand-ins that allocate and keep the same tensors. Collectives and optimizer are left out.
* Tokens are routed evenly over experts. An expert-parallel rank computes with its experts as many tokens as it sends away.
* Not counted: kernels' workspace, the allocator's fragmentation, NCCL's buffers, masked copies (the FLOPs of "layers" give
  them).
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

SHIPPED = Path(__file__).parent / "counts.json"
PROMPT, ANSWER = 128, 16
"""Tokens of the prompt and of the answer in the counted sequences. Peaks do not depend on them, FLOPs by less than 1 %."""
DIMENSIONS = (  # noqa: SIM905
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
    "tie_word_embeddings attention_bias mlp_bias num_experts num_experts_per_tok moe_intermediate_size"
).split()


def dimensions(config: Mapping[str, Any]) -> str:
    """Return the keys of a config.json that a count depends on, as JSON. The number of layers is not among them."""
    given = {name: config[name] for name in DIMENSIONS if config.get(name) not in (None, 0, False)}
    return json.dumps(given, sort_keys=True)


@dataclass(frozen=True)
class Key:
    """What a count depends on, besides the number of layers."""

    model: str  # `dimensions` of the whole model
    tokens: int  # of one rank's micro-batch, in one sequence
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    weights: Literal["fp32", "bf16"] = "fp32"  # stored weights, their gradients and moments
    element: Literal["fp32", "bf16"] = "bf16"  # arithmetic and activations
    recompute: bool = True  # activation checkpointing, layer by layer
    fused: bool = False  # verl's fused kernels, which make no logits
    entropy_rows: int = 2048  # rows of logits per chunk of the entropy; 0: all at once
    lora_rank: int = 0
    importance: str = "fisher"
    probe: Literal["last", "answer_mean", "answer_joint"] = "answer_mean"
    draws: int = 1
    shards: int = 8  # ranks that share one copy of the weights (FSDP)
    tp: int = 1  # tensor-parallel ranks (Megatron)
    sequence_split: int = 1  # ranks that divide the residual stream: `tp` with sequence parallelism
    ep: int = 1  # expert-parallel ranks


class Polynomial(NamedTuple):
    """Coefficients of the powers of a length: those without any layer, and those of each layer."""

    base: tuple[float, ...]
    layer: tuple[float, ...]

    def at(self, layers: float, length: float = 0.0) -> float:
        return sum((a + b * layers) * length**power for power, (a, b) in enumerate(zip(*self, strict=True)))


Counts = dict[str, dict[str, Polynomial]]
"""One rank's numbers: section -> name -> polynomial.

Phases are "log-probs", "importance" (instead of "log-probs", for rows that are scored; missing where the importance needs no
pass) and "update". Sections:
* "parameters": "all", "experts", "embedding", "trained", on this rank before sharding.
* "states": bytes of "weights", "gradients" and "optimizer".
* "flops": by phase, of one sequence of that length; and the forwards of "layers" and "head" (the projection).
* "collectives" and "sent": by phase, their number and the bytes of the whole tensors, of one micro-batch.
* A phase: bytes at its moments: "first layer" (forward or backward; FSDP has gathered the
  embedding), "forward" and "backward" (of other layers), "logits" (from the projection to the end of its backward),
  "noise-free" (the same, of a forward without a backward before a noisy one), "optimizer", and "kept": what the forward keeps
  for the backward. The peak is their maximum.
"""


@cache
def counts(key: Key) -> Counts:
    """Return the counts of `key`: shipped, from the cache, or counted now.

    Raises:
        PlanError: they must be counted, and torch, transformers or a process group that exists prevents it.
    """
    if (name := _name(key)) in (shipped := _shipped()):
        return _parsed(shipped[name])
    source = b"".join(Path(__file__).with_name(file).read_bytes() for file in ("count.py", "fake_step.py"))
    made_by = hashlib.sha256(f"{name} {version('torch')} {version('transformers')}".encode() + source).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oar_plugin" / "counts"
    file = folder / f"{made_by}.json"
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # no cache, or a broken one
        return _parsed(json.loads(file.read_text(encoding="utf-8")))
    print("counting the step on fake tensors, once for this shape: up to 30 s", file=sys.stderr)
    from oar_plugin.runs.plan.fake_step import count

    counted = count(key)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(counted), encoding="utf-8")
        part.replace(file)
    return counted


def ship(keys: Iterable[Key]) -> None:
    """Count these keys and write them to the package, in place of what it had."""
    from oar_plugin.runs.plan.fake_step import count

    lines = (f"{json.dumps(_name(key))}:\n{json.dumps(count(key))}" for key in dict.fromkeys(keys))
    SHIPPED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    _shipped.cache_clear()


def _name(key: Key) -> str:
    return json.dumps(asdict(key), sort_keys=True)


def _parsed(values: Mapping[str, Mapping[str, Any]]) -> Counts:
    return {
        section: {name: Polynomial(*map(tuple, parts)) for name, parts in of.items()} for section, of in values.items()
    }


@cache
def _shipped() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return values
