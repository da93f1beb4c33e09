"""Candidates that need no more than the input embeddings and the gradient there: what engines provide today."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from streams import centred, embeddings, scalar, square, streams

from oar_plugin.bench.fidelity_responses import MicroBatch
from oar_plugin.credit.gradient import kl_coefficients
from oar_plugin.credit.probe import pool
from oar_plugin.passes.taps import ModelTaps


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
    return (run.gradient[0] * (embeddings(model)[batch.replacement_token] - run.stream[0])).sum(-1).square()


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
    return square(run.gradient[0]) * square(embeddings(model)[batch.replacement_token] - run.stream[0])


def norm_times_mean(model: nn.Module, batch: MicroBatch) -> Tensor:
    """||g||^2 ||mean - e||^2 with Fisher's g; 1 + 1."""
    run = streams(model, batch)
    return square(run.gradient[0]) * square(centred(run.stream[0], batch))


def two_points(model: nn.Module, batch: MicroBatch, alpha: float = 0.5, norm: bool = True) -> Tensor:
    """KL gradient with all reasoning tokens moved towards PAD by half; 2 + 1."""
    rows = batch.rows()
    pad_H = embeddings(model)[batch.replacement_token]

    def moved(embedding: Tensor) -> Tensor:
        step = alpha * (pad_H.to(embedding.dtype) - embedding)
        return step * batch.reasoning_BT[..., None]

    with ModelTaps(model) as taps:
        with torch.no_grad():
            taps.prepare(rows.position_N, rows_only=True)
            model(input_ids=batch.token_BT, use_cache=False)
            assert taps.answer_logits is not None
            clean_BV = pool(taps.answer_logits, rows)
        taps.prepare(rows.position_N, moved, rows_only=True)
        model(input_ids=batch.token_BT, use_cache=False)
        assert taps.answer_logits is not None
        assert taps.embedding is not None
        pooled_BV = pool(taps.answer_logits, rows)
        coefficients = kl_coefficients(clean_BV, pooled_BV.detach()).float()
        (gradient,) = torch.autograd.grad((coefficients * pooled_BV).sum(), taps.embedding)
        towards = pad_H - taps.embedding.detach().float()
    return square(gradient.float()) if norm else (gradient.float() * towards).sum(-1).abs()


def integrated(model: nn.Module, batch: MicroBatch, points: tuple[float, ...] = (0.125, 0.375, 0.625, 0.875)) -> Tensor:
    """Integrated gradients of the scalar towards PAD, all reasoning tokens at once, four points; 4 + 4."""
    rows = batch.rows()
    pad_H = embeddings(model)[batch.replacement_token]
    total = torch.zeros(batch.token_BT.shape)
    with ModelTaps(model) as taps:
        for alpha in points:

            def moved(embedding: Tensor, alpha: float = alpha) -> Tensor:
                return alpha * (pad_H.to(embedding.dtype) - embedding) * batch.reasoning_BT[..., None]

            taps.prepare(rows.position_N, moved, rows_only=True)
            model(input_ids=batch.token_BT, use_cache=False)
            assert taps.answer_logits is not None
            assert taps.embedding is not None
            (gradient,) = torch.autograd.grad(scalar(batch, rows, taps.answer_logits, "likelihood"), taps.embedding)
            total += (gradient.float() * (pad_H - taps.embedding.detach().float())).sum(-1) / len(points)
    return total.abs()


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
