"""verl's FSDP and FSDP2 engines with importance: one forward for log-probs, entropy and importance.

`importance_pass.py` chooses the rows and makes the result's fields; this is the pass itself, micro-batch by micro-batch.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from oar_plugin.hosts.micro_batch import MicroBatchScorer
from oar_plugin.hosts.request import IMPORTANCE, Part, Request
from oar_plugin.hosts.taps import ModelTaps, UnsupportedModelError, check_model, unwrapped
from oar_plugin.hosts.verl import cpu
from oar_plugin.hosts.verl.importance_pass import SECONDS, ImportancePass, elapsed, nested
from oar_plugin.hosts.verl.segments import SEQUENCE_SEGMENTS, end_of_sequence_tokens
from oar_plugin.tokens import TokenBytes


class OarFSDPMixin(ImportancePass):
    """Importance for a verl FSDP engine. Put it before the engine in the list of bases."""

    # What the host's engine provides.
    module: nn.Module
    use_remove_padding: bool
    use_ulysses_sp: bool
    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: Any

    _taps: ModelTaps | None = None
    _scorer: MicroBatchScorer | None = None
    _plan: _Forward | None = None
    _copy_row_N: Tensor | None = None
    _here_N: Tensor | None = None
    _pad_size: int = 0

    # ---- the scoring pass

    def _score(self, data: TensorDict, request: Request) -> Any:
        """Forward with a graph and backward to the embeddings, micro-batch by micro-batch."""
        self._limit_micro_batches(data)
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size)
        micro_batches, indices = prepare_micro_batches(
            data=data, dp_group=self._data_parallel_group(), same_micro_num_in_dp=True
        )
        outputs = []
        checkpoint = self.model_config.enable_gradient_checkpointing
        with torch.enable_grad(), ModelTaps(self.module, checkpoint_activations=checkpoint) as taps:
            self._taps = taps
            try:
                for micro_batch in micro_batches:
                    outputs.append(self._score_micro_batch(micro_batch, request))
            finally:
                self._taps = self._scorer = self._plan = None
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _score_micro_batch(self, micro_batch: TensorDict, request: Request) -> dict[str, Any]:
        """Scores and, unless only importance was asked for, log-probs and entropy of one micro-batch."""
        assert self._taps is not None
        self._scorer = None
        started = time.perf_counter()
        output: dict[str, Any] = {"model_output": {}, "loss": 0.0, "metrics": {}}
        host_seconds = 0.0
        if request.importance == "oar_g":
            with torch.no_grad():
                output = self._forward(micro_batch, _Forward(request, None, request.importance_only))
            assert self._scorer is not None
            assert self._taps.answer_logits is not None
            self._scorer.remember_clean(self._taps.answer_logits)
            host_seconds = elapsed(started)
        scores: dict[Part, list[Tensor]] = {part: [] for part in request.parts}
        for draw, part in itertools.product(range(request.num_draws), request.parts):
            rows_only = request.importance_only or request.importance == "oar_g" or draw > 0 or part == "onward"
            drawn = self._forward(micro_batch, _Forward(request, draw, rows_only, part))
            if not rows_only:
                output, host_seconds = drawn, elapsed(started)
            assert self._scorer is not None
            self._scorer.scalar_of(self._taps, draw).backward()
            scores[part].append(self._gathered_scores())

        assert self._scorer is not None
        importance_T = self._scorer.combined({part: torch.stack(drawn).mean(0) for part, drawn in scores.items()})
        output["model_output"][IMPORTANCE] = torch.nested.nested_tensor_from_jagged(importance_T, self._scorer.offsets)
        # The forward for log-probs would have been made anyway; the rest is what importance costs.
        seconds = elapsed(started) - (0.0 if request.importance_only else host_seconds)
        output["model_output"][SECONDS] = nested([torch.tensor([seconds / len(micro_batch)])] * len(micro_batch))
        return output

    def _forward(self, micro_batch: TensorDict, plan: _Forward) -> dict[str, Any]:
        """One tapped forward through verl's own `forward_step`, which knows inputs, autocast and outputs."""
        self._plan = plan
        _, output = self.forward_step(micro_batch, loss_function=None, forward_only=True)  # type: ignore[attr-defined]
        return output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """verl's inputs; in a scoring pass, also where the answer's rows are on this rank."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self._taps is not None and self._copy_row_N is not None:
            local_T = self._local_positions(micro_batch, inputs["input_ids"])
            self._here_N = local_T[self._copy_row_N] >= 0
            self._taps.prepare(local_T[self._copy_row_N][self._here_N], rows_only=True)
        elif self._taps is not None:
            assert self._plan is not None
            if self._scorer is None:
                self._scorer = self._new_scorer(micro_batch, inputs["input_ids"], self._plan.request)
                self._pad_size = arguments.get("pad_size", 0)
            tapped = self._scorer.tap(self._plan.draw, self._plan.part)
            self._taps.prepare(*tapped, rows_only=self._plan.rows_only)
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """verl's log-probs and entropy; nothing when only the answer's rows were projected."""
        if self._copy_row_N is not None or (self._plan is not None and self._plan.rows_only):
            return {}
        return super().prepare_model_outputs(  # type: ignore[misc]
            output, output_args, micro_batch, logits_processor_func
        )

    def _new_scorer(self, micro_batch: TensorDict, local_input_ids: Tensor, request: Request) -> MicroBatchScorer:
        input_ids = micro_batch["input_ids"]
        return MicroBatchScorer(
            request,
            micro_batch[SEQUENCE_SEGMENTS].values(),
            input_ids.values(),
            input_ids.offsets(),
            self._local_positions(micro_batch, local_input_ids),
            local_input_ids.numel(),
            self._sum_over_sequence_ranks,
        )

    def _local_positions(self, micro_batch: TensorDict, local_input_ids: Tensor) -> Tensor:
        """Where each packed token is on this rank, int64 `[T]` into the flattened inputs; -1 where another rank has it."""
        input_ids = micro_batch["input_ids"]
        offsets = input_ids.offsets()
        packed_T = torch.arange(input_ids.values().shape[0], device=input_ids.device)
        width = local_input_ids.shape[-1]
        if self.use_remove_padding:
            # Packed; under Ulysses each rank holds a slice of the pack, with the padding at the end of the last.
            rank = distributed.get_rank(self.ulysses_parallel_group) if self.use_ulysses_sp else 0
            local_T = packed_T - rank * width
            return torch.where((local_T >= 0) & (local_T < width), local_T, -1)
        response_T = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
        return response_T * width + packed_T - offsets[response_T]

    def answer_logits_of(self, micro_batch: TensorDict, row_N: Tensor) -> Tensor:
        """Logits of some packed positions of a micro-batch, `[N, V]`, on every rank that shares its sequences.

        One forward through verl's own `forward_step`, without a graph.
        """
        with torch.no_grad(), ModelTaps(self.module) as taps:
            self._taps, self._copy_row_N = taps, row_N
            try:
                self.forward_step(micro_batch, loss_function=None, forward_only=True)  # type: ignore[attr-defined]
                assert taps.answer_logits is not None
                logits_NV = taps.answer_logits.new_zeros(len(row_N), taps.answer_logits.shape[-1])
                logits_NV[self._here_N] = taps.answer_logits
            finally:
                self._taps = self._copy_row_N = self._here_N = None
        return self._sum_over_sequence_ranks(logits_NV)

    def _gathered_scores(self) -> Tensor:
        """Scores of the packed micro-batch, `[T]`, on every rank; the leaf's gradient is read and dropped."""
        assert self._taps is not None
        assert self._scorer is not None
        embedding = self._taps.embedding
        assert embedding is not None
        assert embedding.grad is not None
        with torch.no_grad():
            local = self._scorer.importance(embedding.grad, embedding).flatten()
            embedding.grad = None
            if self.use_ulysses_sp:
                gathered: Tensor = self._gather_and_unpad_packed(local, self._pad_size)  # type: ignore[attr-defined]
                return gathered
            return local[self._scorer.local_T]

    # ---- what this engine is

    def _sum_over_sequence_ranks(self, tensor: Tensor) -> Tensor:
        if self.use_ulysses_sp:
            distributed.all_reduce(tensor, group=self.ulysses_parallel_group)
        return tensor

    def _check_served(self, request: Request) -> None:
        """Once: refuse a model whose importance would be wrong (see `check_model`)."""
        if request.perturbation is not None and hasattr(unwrapped(self.module).config, "vision_config"):
            raise UnsupportedModelError(
                f"algorithm.oar.importance={request.importance} with a vision-language model: masked copies carry no "
                "images; allowed: fisher, oar_g, onward"
            )
        if self.token_bytes is not None:
            return
        check_model(self.module)
        if self.use_ulysses_sp and hasattr(unwrapped(self.module).config, "vision_config"):
            raise UnsupportedModelError(
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size > 1 with a vision-language model: "
                "verl slices its inputs after the embeddings, where OAR cannot follow; allowed: 1"
            )
        self.token_bytes = TokenBytes(self.model_config.tokenizer)
        self._eos_ids = end_of_sequence_tokens(self.model_config)


def register(transformer_impl: ModuleType) -> None:
    """Register the engine for this machine's device, ahead of verl's own (a vendor's entry wins over a device's)."""
    bases: tuple[type, ...] = (OarFSDPMixin, transformer_impl.FSDPEngineWithLMHead)
    if cpu.wanted():
        from oar_plugin.hosts.verl.cpu.engines import CpuFSDPMixin

        bases = (OarFSDPMixin, CpuFSDPMixin, transformer_impl.FSDPEngineWithLMHead)
    engine = type("OarFSDPEngineWithLMHead", bases, {"__module__": __name__})
    EngineRegistry.register(
        model_type="language_model", backend=["fsdp", "fsdp2"], device=get_device_name(), vendor=get_vendor()
    )(engine)


@dataclass(frozen=True)
class _Forward:
    """What the forward under way is for."""

    request: Request
    draw: int | None  # None: the clean forward of oar_g
    rows_only: bool
    part: Part = "answer"
