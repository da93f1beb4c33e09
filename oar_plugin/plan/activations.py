"""Bytes of activations: what a forward leaves for its backward, and what a pass holds at its peak.

Counted tensor by tensor. Two ways of building a layer:

* `hf`: transformers' modules, as verl's FSDP engines run them. RMSNorm works in float32 and saves that copy; every linear layer
  saves its input where its weight is trained; attention is flash attention, which saves queries, keys, values, its output
  and one float32 a head and token.
* `megatron`: fused norms (no float32 copy) and a fused gated activation, as in Korthikanti et al. 2022 (arXiv 2205.05198,
  section 4) without dropout and without the `5 a s / h` of attention scores; tensor parallelism divides heads and
  inner MLP, sequence parallelism the rest.

In an importance pass weights are frozen, so that linear layers and norms save nothing for a weight gradient.
Recomputation of a layer keeps its input only (arXiv 1604.06174) and holds one whole layer while that is going back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oar_plugin.plan.layout import Recompute
from oar_plugin.plan.shape import ModelShape

Trained = Literal["all", "adapters", "none"]
"""Weights with a gradient: all of them, LoRA adapters on linear layers, or none (an importance pass)."""


@dataclass(frozen=True)
class LayerStyle:
    """How layers are built and divided.

    Attributes:
        build: whose modules.
        element: bytes of an activation.
        tp: ranks that share heads and inner MLP.
        sequence_parallel: those ranks share the rest too.
    """

    build: Literal["hf", "megatron"]
    element: int
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def outer(self) -> int:
        """By how much the tensors outside attention heads and MLP are divided."""
        return self.tp if self.sequence_parallel else 1

    def norm(self, width: int, trained: Trained) -> float:
        """What a norm over `width` saves, per token, without its output."""
        if self.build == "megatron":
            return self.element * width
        # The float32 input; where its scale is trained also the normalised values in the activations' type.
        return 4 * width + (self.element * width if trained == "all" else 0)


def attention_saved(shape: ModelShape, style: LayerStyle, trained: Trained) -> float:
    """Bytes a token that the attention half of a layer leaves for its backward."""
    e = style.element
    inputs = e * shape.hidden if trained != "none" else 0  # the projections' input
    kept: float = e * (2 * shape.query + 2 * shape.key) + 4 * shape.heads  # q, k, v, the output, one logsumexp a head
    if shape.qk_norm:
        kept += style.norm(shape.query + shape.key, trained)
    return (style.norm(shape.hidden, trained) + inputs) / style.outer + kept / style.tp


def mlp_saved(shape: ModelShape, style: LayerStyle, trained: Trained, experts: bool) -> float:
    """Bytes a token that the MLP half of a layer leaves for its backward."""
    e, weights = style.element, trained != "none"
    # Megatron's fused activation saves its input, gate and up; eager code the activated gate as well.
    inner = (2 if style.build == "megatron" else 3) + (1 if weights else 0)
    outside = style.norm(shape.hidden, trained)
    if not experts:
        return (
            outside + (e * shape.hidden if weights else 0)
        ) / style.outer + e * inner * shape.intermediate / style.tp
    k = shape.experts_per_token
    # The expert's output, which is scaled by a weight with a graph, and its input.
    routed = e * k * shape.hidden * (2 if weights else 1)
    router = (e + 4) * shape.experts + (e * shape.hidden if weights else 0)
    return (outside + routed + router) / style.outer + e * inner * k * shape.expert_intermediate / style.tp


def layer_saved(shape: ModelShape, style: LayerStyle, trained: Trained, experts: bool) -> float:
    """Bytes a token that one layer leaves for its backward when nothing is recomputed."""
    return attention_saved(shape, style, trained) + mlp_saved(shape, style, trained, experts)


def _inner(shape: ModelShape) -> int:
    """Width of what is alive inside an MLP, per token."""
    return max(
        shape.intermediate if shape.moe_layers < shape.layers else 0,
        shape.experts_per_token * shape.expert_intermediate,
    )


def forward_working(shape: ModelShape, style: LayerStyle) -> float:
    """Bytes a token that a layer holds at most in a forward without a graph, the residual stream included.

    In the MLP: activated gate, up and their product, beside embeddings, residual, normed input and sum.
    """
    outside = 4 * style.element * shape.hidden
    attention = style.element * (4 * shape.query + 3 * shape.key)
    routed = 2 * style.element * shape.experts_per_token * shape.hidden if shape.experts else 0
    return (outside + routed) / style.outer + max(3 * style.element * _inner(shape), attention) / style.tp


def backward_working(shape: ModelShape, style: LayerStyle) -> float:
    """Bytes a token beside what a layer saved, while its gated MLP goes back: gradients of residual, product, gate and up."""
    return style.element * shape.hidden / style.outer + 3 * style.element * _inner(shape) / style.tp


def _released(shape: ModelShape, style: LayerStyle, trained: Trained) -> float:
    """Bytes a token of the last MLP's product, which its projection has used up by then."""
    return style.element * _inner(shape) / style.tp if trained != "none" else 0.0


@dataclass(frozen=True)
class Held:
    """Bytes a token at the two moments when a pass with a backward can hold most.

    Attributes:
        head: forward done, at the logits (which are not counted here).
        layer: in the backward of the last layer.
    """

    head: float
    layer: float


def held(
    shape: ModelShape,
    style: LayerStyle,
    trained: Trained,
    recompute: Recompute,
    layers: int | None = None,
    in_flight: float = 1.0,
    last: bool = True,
) -> Held:
    """Bytes a token that a pass with a backward holds.

    Args:
        shape: the model.
        style: of its layers.
        trained: which weights have a gradient.
        recompute: `selective` recomputes attention, which flash attention does anyway: the same as `none` here.
        layers: on this rank, if not all (pipeline parallelism).
        in_flight: micro-batches whose activations this rank keeps at once.
        last: this rank has the final norm.
    """
    count = shape.layers if layers is None else layers
    share = count / shape.layers
    moe, dense = shape.moe_layers * share, (shape.layers - shape.moe_layers) * share
    entry = style.element * shape.hidden / style.outer
    full = max(
        layer_saved(shape, style, trained, experts=True) if moe else 0.0,
        layer_saved(shape, style, trained, experts=False) if dense else 0.0,
    )
    everything = 0.0
    if moe:
        everything += moe * layer_saved(shape, style, trained, experts=True)
    if dense:
        everything += dense * layer_saved(shape, style, trained, experts=False)
    final = style.norm(shape.hidden, trained) / style.outer + (entry if trained != "none" else 0.0) if last else 0.0
    going_back = backward_working(shape, style) - _released(shape, style, trained)
    if recompute != "full":
        return Held(in_flight * everything + final, in_flight * everything + going_back)
    inputs = in_flight * count * entry
    # The recomputed layer's input counts once, but for a float32 copy of it.
    own = entry if style.element == 4 or style.build == "megatron" else 0.0
    return Held(inputs + final, inputs + full - own + going_back)
