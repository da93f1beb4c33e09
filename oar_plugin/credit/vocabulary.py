"""Softmax over a vocabulary that may be split over processes: they exchange a maximum and a sum per row, and no logits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the vocabulary that this process holds; by default all columns."""

    start: int = 0  # the first column
    total: Callable[[Tensor], Tensor] = _alone  # sum of a tensor over all processes, in place or not
    largest: Callable[[Tensor], Tensor] = _alone  # element-wise maximum over all processes, in place or not

    def softmax(self, logits_NV: Tensor) -> Tensor:
        """This process's columns of the softmax over the whole vocabulary, in the shape and type of the logits."""
        if self.total is _alone:
            return logits_NV.softmax(-1)
        _, exponential_NV = self._shifted(logits_NV)
        return exponential_NV / self.total(exponential_NV.sum(-1, keepdim=True))

    def log_softmax(self, logits_NV: Tensor) -> Tensor:
        """The logarithm of `softmax`."""
        if self.total is _alone:
            return logits_NV.log_softmax(-1)
        shifted_NV, exponential_NV = self._shifted(logits_NV)
        return shifted_NV - self.total(exponential_NV.sum(-1, keepdim=True)).log()

    def argmax(self, values_NV: Tensor) -> Tensor:
        """The column with the row's largest value, int64 `[N]`."""
        floor_N1 = values_NV.new_full((len(values_NV), 1), -torch.inf)  # a shard of padding only has no columns
        best_N, column_N = torch.cat([values_NV, floor_N1], -1).max(-1)
        here_N = self.largest(best_N.clone()) == best_N
        return self.total(torch.where(here_N, column_N + self.start, 0))

    def entropy(self, logits_NV: Tensor) -> Tensor:
        """Entropy in nats of the softmax over the whole vocabulary, float32 `[N]`. Logits of -inf (banned) add nothing."""
        # A column of probability 0 must add 0, and 0 times -inf is NaN.
        lowest = torch.finfo(torch.float32).min
        if self.total is _alone:
            log_p_NV = logits_NV.float().log_softmax(-1)
            return -(log_p_NV.exp() * log_p_NV.clamp_min_(lowest)).sum(-1)
        shifted_NV, exponential_NV = self._shifted(logits_NV.float())
        weighted_NV = exponential_NV * shifted_NV.clamp_min_(lowest)
        sum_N2 = self.total(torch.stack([exponential_NV.sum(-1), weighted_NV.sum(-1)], -1))
        return sum_N2[:, 0].log() - sum_N2[:, 1] / sum_N2[:, 0]

    def log_prob(self, logits_NV: Tensor, token_N: Tensor) -> Tensor:
        """Log-probability of token `token_N[n]` in row `n`, `[N]`, float32 or as the logits."""
        shifted_NV, exponential_NV = self._shifted(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)))
        column_N1, here_N1 = self._column(token_N, shifted_NV)
        chosen_N = shifted_NV.gather(-1, column_N1).where(here_N1, 0.0).sum(-1)
        sum_N2 = self.total(torch.stack([exponential_NV.sum(-1), chosen_N], -1))
        return sum_N2[:, 1] - sum_N2[:, 0].log()

    def without(self, values_NV: Tensor, token_N: Tensor) -> Tensor:
        """The values, with -inf in column `token_N[n]` of row `n`."""
        column_N1, here_N1 = self._column(token_N, values_NV)
        return values_NV.scatter(-1, column_N1, values_NV.gather(-1, column_N1).masked_fill(here_N1, -torch.inf))

    def subtract_one_at(self, values_NV: Tensor, token_N: Tensor) -> Tensor:
        """Subtract 1 from column `token_N[n]` of row `n`, in place, if this process holds that column."""
        column_N1, here_N1 = self._column(token_N, values_NV)
        return values_NV.scatter_(-1, column_N1, values_NV.gather(-1, column_N1) - here_N1.to(values_NV.dtype))

    def _column(self, token_N: Tensor, values_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's column, int64 `[N, 1]`, and whether it is here; else 0. `[N, 0]` for a shard of padding only."""
        column_N1 = (token_N - self.start)[:, None][:, : values_NV.shape[-1]]
        here_N1 = (column_N1 >= 0) & (column_N1 < values_NV.shape[-1])
        return column_N1.where(here_N1, 0), here_N1

    def _shifted(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Logits minus the row's largest logit in the whole vocabulary, and their exponentials."""
        # A shard of padding only has no columns, and so no largest logit.
        floor_N1 = logits_NV.new_full((*logits_NV.shape[:-1], 1), -torch.inf)
        shifted_NV = logits_NV - self.largest(torch.cat([logits_NV, floor_N1], -1).amax(-1, keepdim=True))
        return shifted_NV, shifted_NV.exp()


WHOLE_VOCABULARY = VocabularyShard()
