"""Runs the masked copies of OAR-P through a causal LM: a plain HuggingFace model, or one wrapped by FSDP.

All copies of a response are the same but for what they mask, so a group of them is a batch without padding. Where the
model keeps keys and values of every position, a group computes only what comes after its first masked token: the rest is
read from the cache of one clean forward. Only the answer's rows are projected to the vocabulary.

Nothing here talks to other processes. Under FSDP every rank must make the same number of forwards: `forwards` says how many
a round takes, `idle` makes one that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import Search, Unit, replacement_seeds, sample_replacements, units
from oar_plugin.credit.probe import Probe
from oar_plugin.passes.request import Perturbation
from oar_plugin.passes.rows import Project
from oar_plugin.passes.tap import Tap
from oar_plugin.passes.taps import ModelTaps, unwrapped

ROW_VALUES = 2**28
"""Answer logits of one forward, at most (1 GiB in float32), unless a single copy has more."""


@dataclass(frozen=True)
class Candidate:
    """A response whose reasoning is to be scored.

    Attributes:
        token_T: int64 `[T]`, prompt and response up to the end of the answer.
        prompt_length: where the response begins; units are positions after it.
        answer_start: where the answer begins; it runs to the end.
    """

    token_T: Tensor
    prompt_length: int
    answer_start: int

    def rows(self, probe: Probe) -> tuple[int, int]:
        """The rows of the probe, `[first, last + 1)`: one before each answer token."""
        first = self.answer_start - 1
        return first, first + 1 if probe == "last" else len(self.token_T) - 1


@dataclass(frozen=True)
class Replacements:
    """What stands in for a token.

    Attributes:
        token: the token, the same everywhere; None: drawn from the model's prediction.
        seed: of the draws (`step_seed`).
    """

    token: int | None
    seed: int = 0

    def fixed(self, candidate: Candidate) -> Tensor | None:
        """int64 `[T]`; None when they must be drawn first."""
        return None if self.token is None else torch.full_like(candidate.token_T, self.token)

    def drawn(self, candidate: Candidate, position_R: Tensor, logits_RV: Tensor) -> Tensor:
        """int64 `[T]`, with a draw at `position_R` from `logits_RV`, the logits of the positions before."""
        token_T = candidate.token_T.clone()
        seed_R = replacement_seeds(candidate.token_T, position_R, self.seed)
        # A slice at a time: Gumbel noise takes 8 bytes a value and more on the way.
        size = max(1, ROW_VALUES // 8 // logits_RV.shape[-1])
        for at in range(0, len(position_R), size):
            here_R = position_R[at : at + size]
            token_T[here_R] = sample_replacements(
                logits_RV[at : at + size], candidate.token_T[here_R], seed_R[at : at + size]
            )
        return token_T


class LogitsReader:
    """A tap that keeps the logits of some rows of a forward without a graph.

    Args:
        row_position_N: see `Tap`.

    Attributes:
        tap: to run the model under.
        logits_NV: set by the forward.
    """

    logits_NV: Tensor

    def __init__(self, row_position_N: Tensor) -> None:
        self.tap = Tap(row_position_N, self._keep)

    def _keep(self, project: Project, hidden_NH: Tensor) -> None:
        self.logits_NV = project(hidden_NH)


class MaskedCopies:
    """Scores units of responses.

    Args:
        module: causal LM, perhaps wrapped by FSDP, in eval mode.
        probe: the outcome.
        replacements: what to mask with.
        max_tokens: tokens of one forward.
    """

    def __init__(
        self,
        module: nn.Module,
        probe: Probe,
        replacements: Replacements,
        max_tokens: int,
    ) -> None:
        self.module = module
        self.probe = probe
        self.replacements = replacements
        self.max_tokens = max_tokens
        self.tokens = 0
        """Tokens computed so far."""
        config: Any = unwrapped(module).config
        self._vocabulary: int = config.get_text_config().vocab_size
        self._shares_prefix = all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)

    def forwards(self, wanted: Sequence[tuple[Candidate, list[Unit]]]) -> int:
        """Forwards that `run` will make."""
        return sum(1 + len(self._groups(candidate, unit_list)) for candidate, unit_list in wanted)

    def idle(self) -> None:
        """One forward that counts for nothing."""
        device = next(self.module.parameters()).device
        self._forward(torch.zeros(1, 1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long), None)

    def run(self, candidate: Candidate, unit_list: list[Unit]) -> list[float]:
        """Scores of the units of one response, in order; see `oar_plugin.credit.importance.oar_p.divergence`."""
        first, end = self.replacement_rows(candidate, unit_list)
        cache = DynamicCache() if self._shares_prefix else None
        row_first, row_end = candidate.rows(self.probe)
        row_N = torch.cat([torch.arange(row_first, row_end), torch.arange(first, end)])
        logits_NV = self._forward(candidate.token_T[None, :row_end], row_N, cache)
        answer = row_end - row_first
        reference = self._outcomes(logits_NV[None, :answer], candidate)[0]
        replacement_T = self.replacements.fixed(candidate)
        if replacement_T is None:
            position_R = torch.arange(first + 1, end + 1, device=logits_NV.device)
            replacement_T = self.replacements.drawn(candidate, position_R, logits_NV[answer:])

        scores = [0.0] * len(unit_list)
        for group in self._groups(candidate, unit_list):
            begin = candidate.prompt_length + unit_list[group[0]][0] if cache is not None else 0
            copy_KT = candidate.token_T[begin:row_end].repeat(len(group), 1)
            masked = [
                (place, candidate.prompt_length + t) for place, index in enumerate(group) for t in unit_list[index]
            ]
            place_M, position_M = torch.tensor(masked, device=copy_KT.device).T
            copy_KT[place_M, position_M - begin] = replacement_T[position_M]
            rows_Km = torch.arange(len(group))[:, None] * copy_KT.shape[1] + torch.arange(row_first, row_end) - begin
            logits_NV = self._forward(copy_KT, rows_Km.flatten(), _shared(cache, begin))
            outcome_K = self._outcomes(logits_NV.view(len(group), answer, -1), candidate)
            for index, score in zip(group, divergence(reference, outcome_K, self.probe).tolist(), strict=True):
                scores[index] = score
        return scores

    def replacement_rows(self, candidate: Candidate, unit_list: list[Unit]) -> tuple[int, int]:
        """Rows whose predictions replacements are drawn from, `[first, end)`; empty when they are fixed."""
        if self.replacements.token is not None:
            return 0, 0
        masked = [candidate.prompt_length + t for unit in unit_list for t in unit]
        return max(0, min(masked) - 1), max(masked)  # nothing predicts the first token of all: it stands for itself

    def _groups(self, candidate: Candidate, unit_list: list[Unit]) -> list[list[int]]:
        """Indices of the units that share a forward, each group in order of position."""
        order = sorted(range(len(unit_list)), key=lambda i: unit_list[i])
        row_first, row_end = candidate.rows(self.probe)
        most = max(1, ROW_VALUES // ((row_end - row_first) * self._vocabulary))
        groups = []
        at = 0
        while at < len(order):
            begin = candidate.prompt_length + unit_list[order[at]][0] if self._shares_prefix else 0
            size = max(1, min(most, self.max_tokens // (row_end - begin)))
            groups.append(order[at : at + size])
            at += size
        return groups

    def _forward(self, token_KT: Tensor, row_N: Tensor, cache: DynamicCache | None) -> Tensor:
        """Logits of some rows of the flattened batch, `[N, V]`; fills or reads `cache`."""
        self.tokens += token_KT.numel()
        begin = cache.get_seq_length() if cache is not None else 0
        position_1T = torch.arange(begin, begin + token_KT.shape[1], device=token_KT.device)[None]
        with torch.no_grad(), ModelTaps(self.module) as taps:
            reader = LogitsReader(row_N.to(token_KT.device))
            taps.tap = reader.tap
            self.module(
                input_ids=token_KT,
                position_ids=position_1T.expand(len(token_KT), -1),
                past_key_values=cache,
                use_cache=cache is not None,
            )
            return reader.logits_NV

    def _outcomes(self, logits_KmV: Tensor, candidate: Candidate) -> Tensor:
        """The probe's outcome of each copy: float64 `[K, V]`, or `[K]` for `answer_joint`."""
        wide_KmV = logits_KmV.to(torch.promote_types(logits_KmV.dtype, torch.float32))
        if self.probe != "answer_joint":
            return log_distribution(wide_KmV.mean(1))
        token_m = candidate.token_T[candidate.answer_start :]
        chosen_Km = wide_KmV.gather(-1, token_m[None, :, None].expand(len(wide_KmV), -1, 1))[..., 0]
        return (chosen_Km.double() - wide_KmV.logsumexp(-1).double()).mean(1)


class _PrefixLayer(DynamicLayer):
    """Keys and values of a prefix `[1, heads, P, D]` in front of every copy's own, which are not kept."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        copies = len(key_states)
        return (
            torch.cat([self.keys.expand(copies, -1, -1, -1), key_states], dim=-2),
            torch.cat([self.values.expand(copies, -1, -1, -1), value_states], dim=-2),
        )


def _shared(cache: DynamicCache | None, length: int) -> DynamicCache | None:
    """The first `length` positions of `cache`, for any number of copies."""
    if cache is None:
        return None
    prefix = DynamicCache()
    prefix.layers = [_PrefixLayer(layer.keys[..., :length, :], layer.values[..., :length, :]) for layer in cache.layers]
    return prefix


def candidate_of(token_T: Tensor, segments_L: Tensor) -> Candidate:
    """A response with its prompt, up to the end of its answer.

    Args:
        token_T: int64 `[T]`, prompt and response.
        segments_L: `Segment` of the response's tokens, with an answer among them.
    """
    prompt_length = len(token_T) - len(segments_L)
    answer = (segments_L == Segment.ANSWER).nonzero()[:, 0]
    return Candidate(token_T[: prompt_length + int(answer[-1]) + 1], prompt_length, prompt_length + int(answer[0]))


def copies_importance(
    copies: MaskedCopies,
    wanted: Mapping[int, tuple[Tensor, Tensor]],
    perturbation: Perturbation,
    gradient: Mapping[int, Tensor] | None = None,
    in_step: Callable[[int], int] = lambda forwards: forwards,
) -> dict[int, Tensor]:
    """Importance of some responses from their masked copies, float32 `[L]` each.

    Args:
        copies: runs them.
        wanted: by row, what `candidate_of` takes: tokens of prompt and response, segments of the response.
        perturbation: which copies.
        gradient: by row, gradient scores `[L]` that choose what a budget goes to; None: blocks do.
        in_step: given how many forwards this process makes next, the most that any other makes. Under FSDP all processes
            make as many.
    """
    candidates, searches = {}, {}
    for row, (token_T, segments_L) in wanted.items():
        candidates[row] = candidate_of(token_T, segments_L)
        chooser = None if gradient is None else gradient[row].tolist()
        unit_list = units((segments_L == Segment.REASONING).tolist(), perturbation.span)
        searches[row] = Search(unit_list, len(segments_L), perturbation.budget, chooser)
    for _ in range(Search.most_rounds(perturbation.budget, gradient is not None)):
        under_way = {row: search for row, search in searches.items() if search.wanted}
        forwards = copies.forwards([(candidates[row], search.wanted) for row, search in under_way.items()])
        most = in_step(forwards)
        for row, search in under_way.items():
            search.send(copies.run(candidates[row], search.wanted))
        for _ in range(most - forwards):
            copies.idle()
    return {row: search.importance.float() for row, search in searches.items() if search.importance is not None}
