"""Batches of the engines' tests' responses, for a plain model."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.hosts.engine import world


def rows_of(numbers=world.SCORED) -> list[tuple[Tensor, Tensor]]:
    """Tokens of prompt and response, and their segments."""
    encoded, rows = world.encode(), []
    for number in numbers:
        prompt, response = encoded[number]
        segments = torch.cat([torch.zeros(len(prompt), dtype=torch.long), world.segments_of(world.ROWS[number][1])])
        rows.append((torch.cat([prompt, response]), segments))
    return rows


def padded(rows, left: bool = False, more: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, L]` tokens, segments and mask; `more`: padding that no response needs."""
    width = max(len(ids) for ids, _ in rows) + more
    token_BL, segments_BL = torch.full((len(rows), width), world.PAD), torch.zeros(len(rows), width, dtype=torch.long)
    mask_BL = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (ids, segments) in enumerate(rows):
        here = slice(width - len(ids), width) if left else slice(len(ids))
        token_BL[row, here], segments_BL[row, here], mask_BL[row, here] = ids, segments, True
    return token_BL, segments_BL, mask_BL


def unpadded(values_BL: Tensor, mask_BL: Tensor) -> list[Tensor]:
    """Each sequence's values; there must be nothing at padding."""
    assert not values_BL[~mask_BL].any()
    return [row[keep] for row, keep in zip(values_BL, mask_BL, strict=True)]


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest error, each response's relative to its largest score."""
    assert all(a.shape == b.shape for a, b in zip(got, want, strict=True))
    return max(((a - b).abs().max() / b.max()).item() for a, b in zip(got, want, strict=True))
