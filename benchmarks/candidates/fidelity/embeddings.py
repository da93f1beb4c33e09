"""Candidates that need no more than the input embeddings and the gradient there: what engines provide today."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from streams import centred, embeddings, square, streams

from benchmarks.fidelity.attention import logits_with_graph
from benchmarks.fidelity.responses import MicroBatch
from oar_plugin.credit.importance.oar_g import kl_coefficients
from oar_plugin.credit.probe import AnswerRows, pool


def likelihood_inner(model: nn.Module, batch: MicroBatch) -> Tensor:
    """|<g, e>| of the answer's log-likelihood; 1 + 1."""
    run = streams(model, batch, "likelihood")
    return (run.gradient[0] * run.stream[0]).sum(-1).abs()


def likelihood_norm(model: nn.Module, batch: MicroBatch) -> Tensor:
    """||g|| of the answer's log-likelihood; 1 + 1."""
    return square(streams(model, batch, "likelihood").gradient[0])


def principal_norm(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Fisher norm along the leading direction in place of random signs; 1 + 1."""
    return square(streams(model, batch, "principal").gradient[0])


def fisher_to_pad(model: nn.Module, batch: MicroBatch) -> Tensor:
    """<g, e_pad - e>^2 with Fisher's g; 1 + 1."""
    run = streams(model, batch)
    return (run.gradient[0] * _to_pad(model, batch)).sum(-1).square()


def fisher_to_mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """<g, mean - e>^2, the mean over the response's tokens; 1 + 1."""
    run = streams(model, batch)
    return (run.gradient[0] * centred(run.stream[0], batch)).sum(-1).square()


def fisher_to_neighbours(model: nn.Module, batch: MicroBatch) -> Tensor:
    """E_v <g, e_v - e>^2 over the vocabulary; 1 + 1 and a product with the embeddings."""
    run = streams(model, batch)
    moved_BTV = run.gradient[0] @ embeddings(model).T
    return (moved_BTV - (run.gradient[0] * run.stream[0]).sum(-1, keepdim=True)).square().mean(-1)


def norm_times_pad(model: nn.Module, batch: MicroBatch) -> Tensor:
    """||g||^2 ||e_pad - e||^2 with Fisher's g; 1 + 1."""
    run = streams(model, batch)
    return square(run.gradient[0]) * square(_to_pad(model, batch))


def norm_times_mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """||g||^2 ||mean - e||^2 with Fisher's g; 1 + 1."""
    run = streams(model, batch)
    return square(run.gradient[0]) * square(centred(run.stream[0], batch))


def _towards_pad(model: nn.Module, batch: MicroBatch, share: float) -> Callable[[Tensor], Tensor]:
    """Moves all reasoning tokens part of the way."""
    pad_H = embeddings(model)[batch.replacement_token]

    def moved(embedding: Tensor) -> Tensor:
        return share * (pad_H.to(embedding.dtype) - embedding) * batch.reasoning_BT[..., None]

    return moved


def _to_pad(model: nn.Module, batch: MicroBatch) -> Tensor:
    """`e_pad - e`, float32 `[B, T, H]`."""
    table_VH = embeddings(model)
    return table_VH[batch.replacement_token] - table_VH[batch.token_BT]


def two_points(model: nn.Module, batch: MicroBatch, norm: bool = True) -> Tensor:
    """KL gradient with all reasoning tokens moved towards PAD by half; 2 + 1."""
    rows = batch.rows()
    with torch.no_grad():
        clean_BV = pool(logits_with_graph(model, rows.position_N, input_ids=batch.token_BT), rows)

    def divergence(logits_NV: Tensor, rows: AnswerRows) -> Tensor:
        pooled_BV = pool(logits_NV, rows)
        return (kl_coefficients(clean_BV, pooled_BV.detach()).float() * pooled_BV).sum()

    gradient = streams(model, batch, divergence, moved=_towards_pad(model, batch, 0.5)).gradient[0]
    return square(gradient) if norm else (gradient * _to_pad(model, batch)).sum(-1).abs()


def integrated(model: nn.Module, batch: MicroBatch, points: tuple[float, ...] = (0.125, 0.375, 0.625, 0.875)) -> Tensor:
    """Integrated gradients of the scalar towards PAD, all reasoning tokens at once, four points; 4 + 4."""
    runs = [streams(model, batch, "likelihood", moved=_towards_pad(model, batch, share)) for share in points]
    return (sum(run.gradient[0] for run in runs) / len(points) * _to_pad(model, batch)).sum(-1).abs()


def two_points_inner(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The same, |<g, e_pad - e>|; 2 + 1."""
    return two_points(model, batch, norm=False)


ESTIMATORS = {
    "ll |<g,e>|": likelihood_inner,
    "ll ||g||": likelihood_norm,
    "principal norm": principal_norm,
    "fisher to pad": fisher_to_pad,
    "fisher to mean": fisher_to_mean,
    "fisher neighbours": fisher_to_neighbours,
    "norm x pad": norm_times_pad,
    "norm x mean": norm_times_mean,
    "two points": two_points,
    "two points inner": two_points_inner,
    "integrated 4": integrated,
}
