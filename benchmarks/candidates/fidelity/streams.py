"""One forward and one backward with everything on the way kept: what the candidates look at. Not an estimator itself.

For HuggingFace decoders as `benchmarks.fidelity.attention` wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.fidelity.attention import logits_with_graph, recorded_heads
from benchmarks.fidelity.estimators import decoder_layers
from benchmarks.fidelity.patching import principal_coefficients
from benchmarks.fidelity.responses import MicroBatch
from oar_plugin.credit.importance.fisher import fisher_coefficients
from oar_plugin.credit.importance.oar_g import joint_coefficients
from oar_plugin.credit.noise import response_seeds, signs
from oar_plugin.credit.probe import AnswerRows, pool
from oar_plugin.passes.plain import packed_rows

Direction = Literal["sign", "principal", "likelihood"]


@dataclass
class Layer:
    """What one attention layer saw, `[B, T, heads * D]`: projections before rotation, heads' outputs; gradients beside."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    d_key: Tensor
    d_value: Tensor
    d_output: Tensor


@dataclass
class Streams:
    """Residual streams `[B, T, H]` in front of each layer (the first: the embeddings), their gradients, and the layers."""

    stream: list[Tensor]
    gradient: list[Tensor]
    layers: list[Layer]


def scalar(batch: MicroBatch, rows: AnswerRows, logits_NV: Tensor, direction: Direction) -> Tensor:
    """What to differentiate: a random root of the Fisher matrix, its leading direction, or the answer's log-likelihood."""
    if direction == "likelihood":
        coefficient_NV = joint_coefficients(logits_NV.detach(), rows.token_N) * rows.share_N[:, None]
        return (coefficient_NV * logits_NV.float()).sum()
    pooled_BV = pool(logits_NV, rows)
    if direction == "principal":
        return (principal_coefficients(pooled_BV.detach()) * pooled_BV).sum()
    packed, _ = packed_rows(batch.token_BT, batch.segments_BT, batch.mask_BT)
    seed_B = response_seeds(packed.token_T, packed.response_T, len(batch.responses), batch.seed)
    return (fisher_coefficients(pooled_BV.detach(), signs(seed_B, 0, pooled_BV.shape[-1])) * pooled_BV).sum()


def streams(
    model: nn.Module,
    batch: MicroBatch,
    direction: Direction | Callable[[Tensor, AnswerRows], Tensor] = "sign",
    layer: int | None = None,
    moved: Callable[[Tensor], Tensor] | None = None,
) -> Streams:
    """Run it, and go back from the scalar of `direction`.

    With `layer`, the gradient does not flow through the residual stream past that layer's MLP (GradDrop). `moved` gives what is
    added to the embeddings.
    """
    inputs: list[Tensor] = []

    def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    layers = decoder_layers(model)
    handles = [one.register_forward_pre_hook(keep_input, with_kwargs=True) for one in layers]
    if layer is not None:
        mlp: Any = layers[layer].mlp
        handles.append(mlp.register_forward_hook(lambda module, args, output: output.detach()))
    rows = batch.rows()
    try:
        with recorded_heads(model) as heads:
            logits_NV = logits_with_graph(model, rows.position_N, moved, input_ids=batch.token_BT)
            lists = [inputs, heads.key, heads.value, heads.output]
            wanted = [x for kept in lists for x in kept]
            start = direction(logits_NV, rows) if callable(direction) else scalar(batch, rows, logits_NV, direction)
            found = torch.autograd.grad(start, wanted)
    finally:
        for handle in handles:
            handle.remove()
    count = len(layers)
    gradient, d_key, d_value, d_output = (
        [x.float() for x in found[at : at + count]] for at in range(0, 4 * count, count)
    )
    kept = [[x.detach().float() for x in part] for part in (heads.query, heads.key, heads.value, heads.output)]
    return Streams(
        [x.detach().float() for x in inputs],
        gradient,
        [Layer(*parts) for parts in zip(*kept, d_key, d_value, d_output, strict=True)],
    )


def square(x: Tensor) -> Tensor:
    """Squared length of the last dimension."""
    return x.square().sum(-1)


def centred(x_BTH: Tensor, batch: MicroBatch) -> Tensor:
    """Less the mean over the response's reasoning tokens."""
    keep_BT1 = batch.reasoning_BT[..., None].float()
    return x_BTH - (x_BTH * keep_BT1).sum(1, keepdim=True) / keep_BT1.sum(1, keepdim=True)


def embeddings(model: nn.Module) -> Tensor:
    """`[V, H]`, float32."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = table.weight.detach().float()
    return weight
