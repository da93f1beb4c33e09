"""What a training step costs one rank: parameters, FLOPs, bytes and collectives, counted on tensors without data.

`counts(key)` runs the host's forward and update and the product's own gradient pass (`oar_plugin.passes`) on HuggingFace's model
class with fake tensors: no GPU, no weights (`fake_step.py`). Every number is linear in the number of layers, so two small numbers
of layers give all depths. FLOPs of a sequence are a polynomial of degree 2 of its length, so three short lengths give all lengths.
Recipes' counts are in `counts.json`; others are counted once and kept in the user's cache folder.

* FLOPs are those of PyTorch's `torch.utils.flop_counter`, matrix products and attention only. Attention counts half of the
  products, because flash attention skips what the causal mask hides.
* Bytes are the peak of each moment above what lies there before the phase: weights, gradients and optimizer states (`states`).
  Gradients of an earlier micro-batch are there: from the second micro-batch on, a new gradient is added to them.
* FSDP1 counts like FSDP2. Under Megatron the model is one rank's: heads, MLP, vocabulary and experts divided. Its fused kernels
  (norms, SwiGLU, cross entropy) are stand-ins that allocate and keep the same tensors. Its collectives and optimizer are not counted.
* Tokens are routed evenly over experts. An expert-parallel rank computes with its experts as many tokens as it sends away.
* Not counted: kernels' workspace, the allocator's fragmentation, NCCL's buffers, masked copies (`flops["layers"]` gives them).
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
DIMENSIONS = (
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
    "tie_word_embeddings attention_bias mlp_bias num_experts num_experts_per_tok moe_intermediate_size"
).split()


def dimensions(config: Mapping[str, Any]) -> str:
    """Return the keys of a config.json that a count depends on, as JSON. The number of layers is not among them."""
    given = {name: config[name] for name in DIMENSIONS if config.get(name) not in (None, 0, False)}
    return json.dumps(given, sort_keys=True)


@dataclass(frozen=True)
class Key:
    """What a count depends on. Tokens are those of one rank's micro-batch (divided by context or Ulysses parallelism)."""

    model: str  # `dimensions` of the whole model
    length: int  # tokens of one sequence, prompt and response; a micro-batch has tokens / length sequences
    log_prob_tokens: int  # of a micro-batch of the log-prob pass
    update_tokens: int  # of a micro-batch of the update; the importance pass has the smaller of the two
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    weights: Literal["fp32", "bf16"] = "fp32"  # stored weights, their gradients and moments
    element: Literal["fp32", "bf16"] = "bf16"  # arithmetic and activations
    recompute: bool = True  # activation checkpointing, layer by layer
    fused: bool = False  # verl's fused kernels, which make no logits
    entropy_rows: int = 2048  # rows of logits per chunk of the entropy; 0: all at once
    lora_rank: int = 0
    importance: str | None = "fisher"  # None: GRPO
    probe: Literal["last", "answer_mean", "answer_joint"] = "answer_mean"
    draws: int = 1
    answer: int = 16  # tokens of the answer, the end of a sequence
    prompt: int = 128  # tokens of the prompt; the others are reasoning
    shards: int = 1  # ranks that share one copy of the weights (FSDP)
    tp: int = 1  # tensor-parallel ranks (Megatron)
    sequence_split: int = 1  # ranks that divide the residual stream: `tp` with sequence parallelism
    ep: int = 1  # expert-parallel ranks


class Linear(NamedTuple):
    """A number that is linear in the number of layers."""

    base: float
    layer: float

    def at(self, layers: int) -> float:
        return self.base + self.layer * layers


class Flops(NamedTuple):
    """FLOPs of one sequence, forward or whole phase. Each part has coefficients c0, c1, c2 of the powers of its length."""

    base: tuple[float, ...]
    layer: tuple[float, ...]

    def at(self, layers: int, length: float) -> float:
        return sum(Linear(*pair).at(layers) * length**power for power, pair in enumerate(zip(*self, strict=True)))


@dataclass(frozen=True)
class Counts:
    """One rank's numbers. Phases: "log-probs", "importance" (instead of "log-probs", for rows that are scored), "update".

    Moments: "forward" (layers), "logits" (projection to the end of its backward), "backward" (layers), "first layer" (its
    backward, when FSDP gathers the embedding), "optimizer" (of the update), and "kept": what the forward keeps for the backward.
    A phase has the moments that it runs through; its peak is their maximum at the model's depth.
    """

    parameters: dict[str, Linear]  # "all", "experts", "embedding", "trained", on this rank before sharding
    states: dict[str, Linear]  # bytes of "weights", "gradients", "optimizer"
    flops: dict[str, Flops]  # phases, "added" (by importance to log-probs), and forwards of "layers" and "head"
    bytes: dict[str, dict[str, Linear]]  # phase -> moment
    collectives: dict[str, dict[str, Linear]]  # phase -> "number", "bytes" (of whole tensors), of one micro-batch

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Counts":
        def linear(pairs: Mapping[str, Any]) -> dict[str, Linear]:
            return {name: Linear(*pair) for name, pair in pairs.items()}

        flops = {name: Flops(*map(tuple, parts)) for name, parts in values["flops"].items()}
        phases = ({phase: linear(of) for phase, of in values[name].items()} for name in ("bytes", "collectives"))
        return cls(linear(values["parameters"]), linear(values["states"]), flops, *phases)


@cache
def counts(key: Key) -> Counts:
    """Return the counts of `key`: shipped, from the cache, or counted now.

    Raises:
        PlanError: they must be counted, and torch, transformers or a process group that exists prevents it.
    """
    name = _digest(key)
    if name in (shipped := _shipped()):
        return Counts.from_json(shipped[name])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oar_plugin" / "counts"
    file = folder / f"{name}-torch{version('torch')}-transformers{version('transformers')}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # no cache, or a broken one
        return Counts.from_json(json.loads(file.read_text(encoding="utf-8")))
    print("counting the step on fake tensors, once for this shape: up to 30 s", file=sys.stderr)
    from oar_plugin.runs.plan.fake_step import count

    counted = count(key)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(counted)), encoding="utf-8")
        part.replace(file)
    return counted


def ship(keys: Iterable[Key]) -> None:
    """Count these keys and write them to the package, in place of what it had."""
    from oar_plugin.runs.plan.fake_step import count

    lines = [f"{json.dumps(_digest(key))}: {json.dumps(asdict(count(key)))}" for key in dict.fromkeys(keys)]
    SHIPPED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    _shipped.cache_clear()


def _digest(key: Key) -> str:
    return hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]


@cache
def _shipped() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return values
