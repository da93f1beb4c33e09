"""What `importance=onward` needs beside the answer's rows: the rows that predict the reasoning (`oar_plugin.credit.onward`).

There are as many of them as there are tokens, so their logits are made a chunk of rows at a time and never kept. The scalar
to differentiate is linear in the logits once its coefficients are held fixed, and so in the hidden states: each chunk gives
its rows' gradient `W^T c`, and what the graph holds is one product of it with the hidden states, `[N, H]`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oar_plugin.credit.gradient import fisher_signs
from oar_plugin.credit.noise import position_seeds
from oar_plugin.credit.onward import onward_coefficients, onward_importance, row_weights
from oar_plugin.credit.probe import AnswerRows
from oar_plugin.credit.vocabulary import VocabularyShard

CHUNK = 256
"""Rows of logits at a time: 0.15 GB of float32 for a vocabulary of 152,000."""


class OnwardRows:
    """The rows of a micro-batch that predict reasoning tokens and are on this rank.

    Args:
        rows: where they are; `position_N` counts in the packed micro-batch.
        seed_B: int64 `[B]`, of each response's signs.
        vocabulary: the columns of the logits that this rank holds.
        num_tokens: T of the packed micro-batch.

    Attributes:
        entropy_T: float32 `[T]`, in nats, of the distribution that each reasoning token was drawn from; set by a forward,
            0 elsewhere and where another rank has the row.
    """

    def __init__(self, rows: AnswerRows, seed_B: Tensor, vocabulary: VocabularyShard, num_tokens: int) -> None:
        self.rows, self.seed_B, self.vocabulary = rows, seed_B, vocabulary
        self.entropy_T = torch.zeros(num_tokens, device=seed_B.device)

    def coefficients(self, draw: int) -> Callable[[Tensor, int], Tensor]:
        """For `weighted_logits`: coefficients of one draw of signs; entropies are noted on the way."""
        seed_B = position_seeds(self.seed_B, torch.zeros_like(self.seed_B), draw)

        def of_chunk(logits_NV: Tensor, start: int) -> Tensor:
            chosen = slice(start, start + len(logits_NV))
            entropy_N = self.vocabulary.entropy(logits_NV)
            self.entropy_T[self.rows.position_N[chosen] + 1] = entropy_N
            sign_NV = fisher_signs(
                "answer_joint", self.rows.select(chosen), seed_B, logits_NV.shape[-1], self.vocabulary
            )
            return onward_coefficients(logits_NV.float(), row_weights(entropy_N), sign_NV, vocabulary=self.vocabulary)

        return of_chunk


def weighted_logits(
    project: Callable[[Tensor], Tensor], hidden_NH: Tensor, coefficients: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """`sum(c * project(hidden))` for coefficients that are held fixed, but for its value: only its gradient is right.

    Args:
        project: from hidden states to logits `[n, V]`; linear.
        hidden_NH: rows with a graph.
        coefficients: given the logits of a chunk of rows without a graph and the first row's number, their coefficients
            `[n, V]`.

    Returns:
        float32 scalar. No `[N, V]` is ever there, in the backward neither.
    """
    gradient_NH = torch.zeros_like(hidden_NH)
    for start in range(0, len(hidden_NH), CHUNK):
        chunk_NH = hidden_NH[start : start + CHUNK].detach().requires_grad_(True)
        with torch.enable_grad():
            logits_NV = project(chunk_NH)
        coefficient_NV = coefficients(logits_NV.detach(), start).to(logits_NV.dtype)
        (gradient_NH[start : start + CHUNK],) = torch.autograd.grad(logits_NV, chunk_NH, coefficient_NV)
    return (gradient_NH * hidden_NH).sum(dtype=torch.float32)


def combined_importance(
    answer_T: Tensor, onward_T: Tensor, entropy_T: Tensor, reasoning_T: Tensor, offsets: Tensor
) -> Tensor:
    """`onward_importance` of a packed batch, `[T]`.

    Args:
        answer_T: squared gradient norms of the answer's scalar.
        onward_T: the same of the reasoning's.
        entropy_T: see `OnwardRows`.
        reasoning_T: bool.
        offsets: int64 `[B + 1]`, where each sequence begins.
    """
    lengths = offsets.diff().tolist()
    padded = [
        torch.nn.utils.rnn.pad_sequence(list(values.split(lengths)), batch_first=True)
        for values in (answer_T, onward_T, entropy_T, reasoning_T)
    ]
    importance_BL = onward_importance(*padded)
    return torch.cat([row[:length] for row, length in zip(importance_BL, lengths, strict=True)])
