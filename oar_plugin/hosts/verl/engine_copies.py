"""Masked copies in verl's training engines: every data-parallel rank scores its own rows, in step with the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import DynamicCache
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.perturbation import Unit, rounds, search
from oar_plugin.hosts.masked_copies import Candidate, MaskedCopies, Replacements
from oar_plugin.hosts.request import Request
from oar_plugin.hosts.verl.segments import response_units


class EngineCopies:
    """The masked copies of one batch.

    Args:
        engine: one of verl's FSDP engines with our mixin, in eval mode.
        data: the batch, as `infer_batch` got it.
        request: with `perturbation` set.
    """

    def __init__(self, engine: Any, data: TensorDict, request: Request) -> None:
        assert request.perturbation is not None
        self.engine = engine
        self.data = data
        self.request = request
        self.perturbation = request.perturbation
        self.input_ids, self.responses = data["input_ids"].unbind(), data["responses"].unbind()
        replacements = Replacements(self.perturbation.replacement_token, request.seed)
        arguments = (
            request.probe,
            replacements,
            self._tokens_of_a_forward(),
            self.perturbation.perturbations_per_forward,
        )
        self.copies: MaskedCopies = (
            _SequenceParallelCopies(engine, data, *arguments)
            if engine.use_ulysses_sp
            else MaskedCopies(engine.module, *arguments)
        )

    def importance(self, segments: Sequence[Tensor], status_B: Tensor, gradient: Sequence[Tensor]) -> list[Tensor]:
        """Importance of each row, float32 `[L_i]`; zeros where `status_B` is not SCORED.

        Args:
            segments: int8 `[L_i]` of `Segment`.
            status_B: int64 `[B]` of `Status`.
            gradient: gradient scores `[L_i]`, which choose the units of a budget for `hybrid`.
        """
        result = [torch.zeros(len(segment)) for segment in segments]
        searches, candidates = {}, {}
        for row in (status_B == Status.SCORED).nonzero()[:, 0].tolist():
            candidates[row] = self._candidate(row, segments[row])
            chooser = gradient[row].tolist() if self.request.importance == "hybrid" else None
            searches[row] = search(
                self._units(row, segments[row]), len(segments[row]), self.perturbation.budget, chooser
            )
        wanted: dict[int, list[Unit]] = {row: next(under_way) for row, under_way in searches.items()}
        for _ in range(rounds(self.perturbation.budget, self.request.importance == "hybrid")):
            for row, scores in self._run_round(candidates, wanted).items():
                try:
                    wanted[row] = searches[row].send(scores)
                except StopIteration as stop:
                    result[row] = stop.value.float()
                    del wanted[row]
        return result

    def _run_round(self, candidates: dict[int, Candidate], wanted: dict[int, list[Unit]]) -> dict[int, list[float]]:
        forwards = self.copies.forwards([(candidates[row], unit_list) for row, unit_list in wanted.items()])
        most = self.engine.largest_count(forwards)
        scores = {}
        with self._autocast():
            for row, unit_list in wanted.items():
                scores[row] = self.copies.run(candidates[row], unit_list)
            for _ in range(most - forwards):
                self.copies.idle()
        return scores

    def _candidate(self, row: int, segments: Tensor) -> Candidate:
        token_T = self.input_ids[row].to(get_device_id())
        prompt_length = len(token_T) - len(segments)
        answer = (segments == Segment.ANSWER).nonzero()[:, 0]
        return Candidate(token_T[: prompt_length + int(answer[-1]) + 1], prompt_length, prompt_length + int(answer[0]))

    def _units(self, row: int, segments: Tensor) -> list[Unit]:
        return response_units(
            segments.tolist(), self.responses[row].tolist(), self.perturbation.span, self.engine.token_bytes
        )

    def _tokens_of_a_forward(self) -> int:
        """The token budget of verl's log-prob pass."""
        if tu.get_non_tensor_data(data=self.data, key="use_dynamic_bsz", default=True):
            budget: int = self.data["max_token_len_per_gpu"] * self.engine.ulysses_sequence_parallel_size
            return budget
        longest = int(self.data["input_ids"].offsets().diff().max())
        return int(self.data["micro_batch_size_per_gpu"]) * longest

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What verl's `forward_step` runs the model in."""
        dtype = getattr(self.engine, "_autocast_dtype", torch.bfloat16)
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=dtype)


class _SequenceParallelCopies(MaskedCopies):
    """Whole copies through verl's own forward, which cuts the sequences up among the ranks of a Ulysses group.

    A prefix cannot be shared: verl's attention exchanges heads for positions over the whole pack.
    """

    def __init__(self, engine: Any, data: TensorDict, *arguments: Any) -> None:
        super().__init__(engine.module, *arguments)
        self._shares_prefix = False
        self.engine = engine
        # verl's fields and flags around the tokens: those of any row will do, for a forward that projects rows only.
        self.template = tu.index_select_tensor_dict(data, torch.tensor([0]))

    def _forward(self, token_KT: Tensor, row_N: Tensor, cache: DynamicCache | None) -> Tensor:
        self.tokens += token_KT.numel()
        copies, length = token_KT.shape
        micro_batch = tu.index_select_tensor_dict(self.template, torch.zeros(copies, dtype=torch.long))
        offsets = torch.arange(copies + 1, device=token_KT.device) * length
        position_T = torch.arange(length, device=token_KT.device).repeat(copies)
        for name, values_T in (("input_ids", token_KT.flatten()), ("position_ids", position_T)):
            micro_batch[name] = torch.nested.nested_tensor_from_jagged(values_T, offsets)
        logits_NV: Tensor = self.engine.answer_logits_of(micro_batch, row_N.to(token_KT.device))
        return logits_NV
