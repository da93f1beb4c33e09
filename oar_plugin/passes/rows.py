"""The gradient of a weighted sum of many rows' logits, without a graph over the vocabulary.

There may be thousands of rows, so their logits are computed in chunks and not kept. With fixed coefficients `c`, a chunk's
gradient at the hidden states is `W^T c`, with the projection's weights `W`; `W^T (f'(z) c)` if the model changes its logits
`z` by a function `f`. The graph holds only this gradient times the hidden states, `[N, H]`; only the forward needs `W`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 256  # rows of logits: 0.15 GB of float32 for a vocabulary of 152,000

Project = Callable[[Tensor], Tensor]
"""The projection from hidden states `[N, H]` to logits `[N, V]`, row by row. It may overwrite its own results. One that is not
linear has an attribute `linear` that is false."""


def projected_back(project: Project, hidden_NH: Tensor, coefficients: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """The gradient of `sum(c * project(hidden))` at the hidden states, `[N, H]`, float32 or better, no graph.

    `coefficients` takes the logits of a chunk of rows, without a graph, and the slice of these rows; returns their fixed `c`.
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
        (scaled_NH,) = torch.autograd.grad(logits_NV, chunk_NH, coefficient_NV.to(logits_NV.dtype))
        gradient_NH[chosen] = scaled_NH if exponent_N1 is None else torch.ldexp(scaled_NH.float(), exponent_N1)
    return gradient_NH


def scalar_with(gradient_NH: Tensor, hidden_NH: Tensor) -> Tensor:
    """A float32 scalar whose gradient with respect to the hidden states is `gradient_NH`. Its value is meaningless."""
    return (gradient_NH.to(hidden_NH.dtype) * hidden_NH).sum(dtype=torch.float32)


@torch.no_grad()
def read_logits(project: Project, hidden_NH: Tensor, read: Callable[[Tensor, slice], None]) -> None:
    """Calls `read` with the logits of each chunk of rows, without a graph; without rows, once with an empty chunk."""
    for start in range(0, max(1, len(hidden_NH)), CHUNK):
        chosen = slice(start, start + CHUNK)
        read(project(hidden_NH[chosen].detach()), chosen)
