"""Softmax over a vocabulary that may be spread over several processes.

A vocabulary-parallel rank holds some columns of the logits. What the estimators need of the others are two numbers a row,
the largest logit and the sum of the exponentials, so those travel and the logits do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the vocabulary that this process holds; by default all of them.

    Attributes:
        start: the first of them.
        total: over all processes: sums a tensor, in place or not.
        largest: over all processes: the element-wise maximum of a tensor, in place or not.
    """

    start: int = 0
    total: Callable[[Tensor], Tensor] = _alone
    largest: Callable[[Tensor], Tensor] = _alone

    def softmax(self, logits_NV: Tensor) -> Tensor:
        """This process's columns of the softmax over the whole vocabulary, of the shape and type of the logits."""
        if self.total is _alone:
            return logits_NV.softmax(-1)
        # A shard that holds nothing but padding has no columns, and so no largest logit.
        floor_N1 = logits_NV.new_full((*logits_NV.shape[:-1], 1), -torch.inf)
        exponential_NV = (logits_NV - self.largest(torch.cat([logits_NV, floor_N1], -1).amax(-1, keepdim=True))).exp()
        return exponential_NV / self.total(exponential_NV.sum(-1, keepdim=True))

    def entropy(self, logits_NV: Tensor) -> Tensor:
        """Entropy in nats of the softmax over the whole vocabulary, float32 `[N]`."""
        logits_NV = logits_NV.float()
        floor_N1 = logits_NV.new_full((len(logits_NV), 1), -torch.inf)
        shifted_NV = logits_NV - self.largest(torch.cat([logits_NV, floor_N1], -1).amax(-1, keepdim=True))
        exponential_NV = shifted_NV.exp()
        sum_N2 = self.total(torch.stack([exponential_NV.sum(-1), (exponential_NV * shifted_NV).sum(-1)], -1))
        return sum_N2[:, 0].log() - sum_N2[:, 1] / sum_N2[:, 0]

    def subtract_one_at(self, values_NV: Tensor, token_N: Tensor) -> Tensor:
        """Subtract 1 from column `token_N[n]` of row n, in place and where that column is here."""
        column_N = token_N - self.start
        here_N = (column_N >= 0) & (column_N < values_NV.shape[-1])
        values_NV[here_N, column_N[here_N]] -= 1.0
        return values_NV


WHOLE_VOCABULARY = VocabularyShard()
