"""The importance of one micro-batch, whatever engine runs it.

Turns a packed micro-batch into the rows to tap, the scalar to differentiate and the scores per token. An engine supplies
what depends on its layout: where a packed position lives on this rank, and how to sum over the ranks that share a
sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gradient import (
    fisher_coefficients,
    fisher_importance,
    fisher_signs,
    joint_coefficients,
    kl_coefficients,
    saliency_importance,
)
from oar_plugin.credit.noise import gaussian, position_seeds, response_seeds
from oar_plugin.credit.onward import onward_coefficients
from oar_plugin.credit.probe import AnswerRows, answer_rows, pool
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard
from oar_plugin.hosts.onward import OnwardRows, combined_importance
from oar_plugin.hosts.request import Part, Request
from oar_plugin.hosts.taps import ModelTaps


class MicroBatchScorer:
    """The importance of one packed micro-batch.

    Args:
        request: what to compute.
        segments_T: int64 `[T]`, `Segment` of each packed token, from `SEQUENCE_SEGMENTS`.
        token_T: int64 `[T]` packed token ids.
        offsets: int64 `[B + 1]`, where each sequence begins.
        local_T: int64 `[T]`, flattened position of each packed token on this rank, -1 where another rank holds it.
        local_size: embeddings this rank holds, padding included.
        sum_over_sequence_ranks: sums a tensor over the ranks that share the sequences, in place or not; identity where a
            rank holds whole sequences.
        embedding_T: like `local_T` for the embeddings, where a rank holds fewer of them than of the logits' rows
            (Megatron's sequence parallelism).
        vocabulary: the columns of the logits that this rank holds.
    """

    def __init__(
        self,
        request: Request,
        segments_T: Tensor,
        token_T: Tensor,
        offsets: Tensor,
        local_T: Tensor,
        local_size: int,
        sum_over_sequence_ranks: Callable[[Tensor], Tensor],
        embedding_T: Tensor | None = None,
        vocabulary: VocabularyShard = WHOLE_VOCABULARY,
    ) -> None:
        self.request = request
        self.vocabulary = vocabulary
        self.sum_over_sequence_ranks = sum_over_sequence_ranks
        self.local_T = local_T
        self.offsets = offsets
        self.reasoning_T = segments_T == Segment.REASONING
        num_responses = len(offsets) - 1
        lengths_B = offsets.diff()
        response_T = torch.repeat_interleave(torch.arange(num_responses, device=offsets.device), lengths_B)
        self.seed_B = response_seeds(token_T, response_T, num_responses, request.seed)
        rows = answer_rows(segments_T == Segment.ANSWER, response_T, token_T, num_responses, request.probe)
        here_N = local_T[rows.position_N] >= 0
        self.rows: AnswerRows = rows.select(here_N)
        embedding_T = local_T if embedding_T is None else embedding_T
        reasoning_N = (self.reasoning_T & (embedding_T >= 0)).nonzero()[:, 0]
        self.onward: OnwardRows | None = None
        if request.importance == "onward":
            reasoning = answer_rows(self.reasoning_T, response_T, token_T, num_responses, "answer_joint")
            here = reasoning.select(local_T[reasoning.position_N] >= 0)
            self.onward = OnwardRows(here, self.seed_B, vocabulary, len(token_T))
        self._noisy_local_N = embedding_T[reasoning_N]
        self._noisy_seed_N = self.seed_B[response_T[reasoning_N]]
        self._noisy_place_N = reasoning_N - offsets[response_T[reasoning_N]]
        self._local_size = local_size
        self._clean_logits: Tensor | None = None

    def tap(
        self, draw: int | None, part: Part = "answer"
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None, Callable[[Tensor, int], Tensor] | None]:
        """What a forward is tapped for, as `ModelTaps.prepare` takes it.

        Args:
            draw: number of the draw, from 0; None for the clean forward of `oar_g`.
            part: what the backward will start from.

        Returns:
            Rows, int64 `[N]` into this rank's flattened hidden states; noise for the embeddings or None; and what to weight
            the rows' logits with as they are made, or None where `scalar` does that afterwards.
        """
        if part == "onward" and draw is not None and self.onward is not None:
            return self.local_T[self.onward.rows.position_N], None, self.onward.coefficients(draw)
        noisy = self.request.importance == "oar_g" and draw is not None
        return self.local_T[self.rows.position_N], self.noise(draw) if noisy and draw is not None else None, None

    def noise(self, draw: int) -> Callable[[Tensor], Tensor]:
        """Noise of `oar_g` for an embedding tensor `[..., H]`: N(0, sigma^2) at reasoning tokens, 0 elsewhere."""

        def make(embedding: Tensor) -> Tensor:
            size = embedding.shape[-1]
            values_NH = gaussian(position_seeds(self._noisy_seed_N, self._noisy_place_N, draw), size)
            flat = torch.zeros(self._local_size, size, device=embedding.device)
            flat[self._noisy_local_N] = values_NH * self.request.sigma
            return flat.view_as(embedding)

        return make

    def remember_clean(self, logits_NV: Tensor) -> None:
        """Keep the probe of the clean forward, the reference distribution P of `oar_g`."""
        self._clean_logits = self._probe_logits(logits_NV.detach())

    def scalar(self, logits_NV: Tensor, draw: int) -> Tensor:
        """The scalar of the part `answer`, whose gradient is the importance's raw material.

        Args:
            logits_NV: this rank's rows with a graph.
            draw: number of the draw, from 0.

        Returns:
            float32 scalar; over the ranks that share sequences the scalars add up to the whole.
        """
        rows, request = self.rows, self.request
        if request.importance == "oar_g":
            # Divided by sigma so that half precision does not underflow; `importance` multiplies it back.
            if request.probe == "answer_joint":
                coefficients = joint_coefficients(logits_NV.detach(), rows, self.vocabulary) / request.sigma
                return (coefficients * logits_NV.float()).sum()
            assert self._clean_logits is not None
            noisy = self._probe_logits(logits_NV.detach())
            coefficients = kl_coefficients(self._clean_logits, noisy, self.vocabulary) / request.sigma
            return (coefficients.float() * pool(logits_NV, rows)).sum()

        seed_B = self.seed_B if draw == 0 else position_seeds(self.seed_B, torch.zeros_like(self.seed_B), draw)
        if request.importance == "onward":
            sign = fisher_signs("answer_joint", rows, seed_B, logits_NV.shape[-1], self.vocabulary)
            ones_N = torch.ones_like(rows.share_N)
            coefficients = onward_coefficients(logits_NV.detach().float(), ones_N, sign, vocabulary=self.vocabulary)
            return (coefficients * logits_NV.float()).sum()
        sign = fisher_signs(request.probe, rows, seed_B, logits_NV.shape[-1], self.vocabulary)
        if request.probe == "answer_joint":
            coefficients = fisher_coefficients(logits_NV.detach(), sign, self.vocabulary) * rows.share_N[:, None]
            return (coefficients * logits_NV.float()).sum()
        coefficients = fisher_coefficients(self._probe_logits(logits_NV.detach()), sign, self.vocabulary)
        return (coefficients * pool(logits_NV, rows)).sum()

    def scalar_of(self, taps: ModelTaps, draw: int) -> Tensor:
        """What the forward that `taps` has just seen is differentiated by: `scalar`, or the weighted sum where there is one."""
        if taps.weighted_sum is not None:
            return taps.weighted_sum
        assert taps.answer_logits is not None
        return self.scalar(taps.answer_logits, draw)

    def importance(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        """Scores of this rank's positions, float32 of the shape of the embeddings without their last dimension."""
        if self.request.importance == "oar_g":
            return saliency_importance(gradient, embedding) * self.request.sigma
        return fisher_importance(gradient)

    def combined(self, scores: dict[Part, Tensor]) -> Tensor:
        """Importance `[T]` from the scores `[T]` of each part over the whole sequences, 0 outside the reasoning."""
        total_T = scores["answer"]
        if self.onward is not None:
            entropy_T = self.sum_over_sequence_ranks(self.onward.entropy_T)
            total_T = combined_importance(total_T, scores["onward"], entropy_T, self.reasoning_T, self.offsets)
        return torch.where(self.reasoning_T, total_T, 0.0)

    def _probe_logits(self, logits_NV: Tensor) -> Tensor:
        return self.sum_over_sequence_ranks(pool(logits_NV, self.rows))
