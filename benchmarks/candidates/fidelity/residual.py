"""Candidates that read gradients at the residual streams or at the values of every layer: all from one backward."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from streams import centred, square, streams

from benchmarks.fidelity.responses import MicroBatch


def at_depth(model: nn.Module, batch: MicroBatch, depth: float) -> Tensor:
    """Fisher norm at the residual stream part of the way up; 1 + less than 1."""
    found = streams(model, batch).gradient
    return square(found[min(len(found) - 1, max(1, round(depth * len(found))))])


def sum_of_norms(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Sum over layers of ||g_l||^2; 1 + 1."""
    return torch.stack([square(g) for g in streams(model, batch).gradient]).sum(0)


def sum_times_stream(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Sum over layers of ||g_l||^2 ||h_l - mean||^2; 1 + 1."""
    run = streams(model, batch)
    parts = [square(g) * square(centred(h, batch)) for g, h in zip(run.gradient, run.stream, strict=True)]
    return torch.stack(parts).sum(0)


def virtual_mask(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Sum over layers of <g_l, h_l - mean>^2: a token's stream replaced by the response's mean; 1 + 1."""
    run = streams(model, batch)
    parts = [(g * centred(h, batch)).sum(-1).square() for g, h in zip(run.gradient, run.stream, strict=True)]
    return torch.stack(parts).sum(0)


def largest_virtual_mask(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The same, the largest layer; 1 + 1."""
    run = streams(model, batch)
    parts = [(g * centred(h, batch)).sum(-1).square() for g, h in zip(run.gradient, run.stream, strict=True)]
    return torch.stack(parts).amax(0)


def product_of_ranks(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Product of the ranks of the Fisher norm at the embeddings and behind the first quarter of the layers; 1 + 1."""
    found = streams(model, batch).gradient
    second = found[min(len(found) - 1, max(1, round(len(found) / 4)))]
    parts = [square(g).masked_fill(~batch.reasoning_BT, -1.0).argsort(-1).argsort(-1) for g in (found[0], second)]
    return (parts[0] * parts[1]).double()


def value_norms(model: nn.Module, batch: MicroBatch) -> Tensor:
    """(Sum over layers of ||dJ/dv_l||)^2, v_l the values of the attention; 1 + 1."""
    return torch.stack([square(layer.d_value).sqrt() for layer in streams(model, batch).layers]).sum(0).square()


def value_product(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Product over layers of ||dJ/dv_l||: matters at every depth; 1 + 1."""
    return (
        torch.stack([square(layer.d_value) for layer in streams(model, batch).layers])
        .clamp_min(1e-30)
        .log()
        .mean(0)
        .exp()
    )


def grad_drop(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Virtual masking, mean over backwards in each of which one layer's MLP passes no gradient; 1 + 1 a layer."""
    count = len(streams(model, batch).gradient)
    total = torch.zeros(batch.token_BT.shape)
    for layer in range(count):
        run = streams(model, batch, layer=layer)
        for g, h in zip(run.gradient, run.stream, strict=True):
            total += (g * centred(h, batch)).sum(-1).abs()
    return total


ESTIMATORS = {
    "depth 1/4": partial(at_depth, depth=0.25),
    "depth 1/2": partial(at_depth, depth=0.5),
    "sum ||g||": sum_of_norms,
    "sum ||g|| ||dh||": sum_times_stream,
    "sum <g,dh>": virtual_mask,
    "max <g,dh>": largest_virtual_mask,
    "rank product": product_of_ranks,
    "values": value_norms,
    "values product": value_product,
    "grad drop": grad_drop,
}
