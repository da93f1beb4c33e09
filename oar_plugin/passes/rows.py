"""A weighted sum of many rows' logits, without a graph over the vocabulary.

There are as many reasoning rows as tokens, so their logits are made a chunk of rows at a time and never kept. The scalar to
differentiate is linear in the logits once its coefficients are held fixed, and so in the hidden states: each chunk gives its
rows' gradient `W^T c`, and what the graph holds is one product of it with the hidden states, `[N, H]`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 256
"""Rows of logits at a time: 0.15 GB of float32 for a vocabulary of 152,000."""

Project = Callable[[Tensor], Tensor]
"""From hidden states `[N, H]` to logits `[N, V]`; linear."""

Chunk = Callable[[Tensor, slice], Tensor]
"""Given the logits of some rows, without a graph, and which rows: something of the same rows."""


def weighted_logits(project: Project, hidden_NH: Tensor, coefficients: Chunk) -> Tensor:
    """A scalar with the gradient of `sum(c * project(hidden))`, `c` held fixed. Its value means nothing.

    Args:
        project: see `Project`.
        hidden_NH: rows with a graph.
        coefficients: of a chunk of rows, `[n, V]`.

    Returns:
        float32 scalar. No `[N, V]` is ever there, in the backward neither.
    """
    gradient_NH = torch.zeros_like(hidden_NH)
    for start in range(0, len(hidden_NH), CHUNK):
        chosen = slice(start, start + CHUNK)
        chunk_NH = hidden_NH[chosen].detach().requires_grad_(True)
        with torch.enable_grad():
            logits_NV = project(chunk_NH)
        coefficient_NV = coefficients(logits_NV.detach(), chosen).to(logits_NV.dtype)
        (gradient_NH[chosen],) = torch.autograd.grad(logits_NV, chunk_NH, coefficient_NV)
    return (gradient_NH * hidden_NH).sum(dtype=torch.float32)


@torch.no_grad()
def read_logits(project: Project, hidden_NH: Tensor, read: Callable[[Tensor, slice], None]) -> None:
    """Show `read` the logits of all rows, a chunk at a time and without a graph."""
    for start in range(0, len(hidden_NH), CHUNK):
        chosen = slice(start, start + CHUNK)
        read(project(hidden_NH[chosen].detach()), chosen)
