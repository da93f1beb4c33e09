"""What a training step costs, counted on tensors without data: FLOPs of a model, bytes and collectives of an FSDP rank.

`fake_step.count(key)` runs the host's forward and update and the package's own gradient pass (`oar_plugin.passes`) on
HuggingFace's model class with fake tensors: no GPU, no weights. Every number is linear in the number of layers, so two small
numbers of layers give all. FLOPs are a polynomial of degree 2 of a sequence's length, so three lengths give all.

* FLOPs are those of PyTorch's `torch.utils.flop_counter`, matrix products and attention only. Attention counts half of the
  products, because flash attention skips what the causal mask hides.
* Bytes are the peak of each part of a phase above the bytes that are allocated when the phase starts. Gradients of an earlier
  micro-batch are among those: from the second micro-batch on, a new gradient is added to them. FSDP1 counts like FSDP2.
* The importance pass is that of `fisher`, which needs as much memory as the others or more. It has one pooled row per response.
* Not counted: Megatron's bytes (`costs.py` has formulas), kernels' workspace, the allocator's fragmentation, NCCL's buffers,
  masked copies (the FLOPs of "layers" give them), and rollout engines.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

DIMENSIONS = (  # noqa: SIM905
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
    "tie_word_embeddings attention_bias mlp_bias num_experts num_experts_per_tok moe_intermediate_size"
).split()


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
