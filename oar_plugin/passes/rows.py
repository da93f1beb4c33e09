"""The gradient of a weighted sum of many rows' logits, without a graph over the vocabulary.

An answer may have thousands of rows, and there are as many reasoning rows as tokens, so logits are made a chunk of rows at a
time and never kept. The scalar to differentiate is linear in the logits once its coefficients are held fixed, and so in the
hidden states: each chunk gives its rows' gradient `W^T c`, and what the graph holds is one product of it with the hidden
states, `[N, H]`. The weights `W` are needed in the forward alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 256
"""Rows of logits at a time: 0.15 GB of float32 for a vocabulary of 152,000."""

Project = Callable[[Tensor], Tensor]
"""From hidden states `[N, H]` to logits `[N, V]`; linear, perhaps with a bias."""

Chunk = Callable[[Tensor, slice], Tensor]
"""Given the logits of some rows, without a graph, and which rows: something of the same rows."""


def projected_back(project: Project, hidden_NH: Tensor, coefficients: Chunk) -> Tensor:
    """The gradient of `sum(c * project(hidden))`, `c` held fixed, float32 or better `[N, H]`.

    Args:
        project: see `Project`.
        hidden_NH: rows, with a graph or without; none is made.
        coefficients: of a chunk of rows, `[n, V]`.
    """
    gradient_NH = torch.zeros_like(hidden_NH, dtype=torch.promote_types(hidden_NH.dtype, torch.float32))
    for start in range(0, len(hidden_NH), CHUNK):
        chosen = slice(start, start + CHUNK)
        chunk_NH = hidden_NH[chosen].detach().requires_grad_(True)
        with torch.enable_grad():
            logits_NV = project(chunk_NH)
        coefficient_NV, exponent_N1 = coefficients(logits_NV.detach(), chosen), None
        if logits_NV.dtype == torch.float16:  # a small coefficient would be 0, a large one infinite
            exponent_N1 = torch.frexp(coefficient_NV.abs().amax(-1, keepdim=True)).exponent
            coefficient_NV = torch.ldexp(coefficient_NV, -exponent_N1)
        (found_NH,) = torch.autograd.grad(logits_NV, chunk_NH, coefficient_NV.to(logits_NV.dtype))
        gradient_NH[chosen] = found_NH if exponent_N1 is None else torch.ldexp(found_NH.float(), exponent_N1)
    return gradient_NH


def scalar_with(gradient_NH: Tensor, hidden_NH: Tensor) -> Tensor:
    """A float32 scalar with this gradient with respect to the hidden states. Its value means nothing."""
    return (gradient_NH.to(hidden_NH.dtype) * hidden_NH).sum(dtype=torch.float32)


@torch.no_grad()
def read_logits(project: Project, hidden_NH: Tensor, read: Callable[[Tensor, slice], None]) -> None:
    """Show `read` the logits of all rows, a chunk at a time and without a graph; an empty chunk where there are none."""
    for start in range(0, max(1, len(hidden_NH)), CHUNK):
        chosen = slice(start, start + CHUNK)
        read(project(hidden_NH[chosen].detach()), chosen)
