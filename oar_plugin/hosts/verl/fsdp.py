"""verl's FSDP and FSDP2 engines with importance: one forward for log-probs, entropy and importance.

`importance_pass.py` chooses the rows and makes the result's fields; this runs the forwards of `passes.gradient`, micro-batch by
micro-batch, through verl's own `forward_step`, which knows inputs, autocast and outputs. verl makes a forward's inputs inside
of that, so what a forward is for is a function that makes its `Tap` once they are known: the engine's one attribute.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from oar_plugin.credit.importance import Forward, without_copies
from oar_plugin.hosts.verl.importance_pass import ImportancePass, elapsed, register_engine, score_fields
from oar_plugin.hosts.verl.segments import SEQUENCE_SEGMENTS
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed
from oar_plugin.passes.request import Request
from oar_plugin.passes.tap import Tap, UnsupportedModelError
from oar_plugin.passes.taps import ModelTaps, check_model, unwrapped


class OarFSDPMixin(ImportancePass):
    """Importance for a verl FSDP engine. Put it before the engine in the list of bases."""

    # What the host's engine provides.
    module: nn.Module
    use_remove_padding: bool
    use_ulysses_sp: bool
    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: Any

    # The forward under way: the hooks, and what makes its tap once verl has the micro-batch on the device and its inputs.
    _tapped: tuple[ModelTaps, Callable[[TensorDict, Tensor], Tap]] | None = None

    # ---- the scoring pass

    def _score(self, data: TensorDict, request: Request) -> Any:
        """Forward with a graph and backward to the embeddings, micro-batch by micro-batch."""
        self._limit_micro_batches(data)
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size)
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        # verl's activation offload acts in training alone: here the activations that it saves are computed again.
        checkpoint = self.model_config.enable_gradient_checkpointing or self.model_config.enable_activation_offload
        with ModelTaps(self.module, checkpoint_activations=checkpoint) as taps:
            outputs = [self._score_micro_batch(micro_batch, request, taps) for micro_batch in micro_batches]
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _score_micro_batch(self, micro_batch: TensorDict, request: Request, taps: ModelTaps) -> dict[str, Any]:
        """Scores and, unless only importance was asked for, log-probs and entropy of one micro-batch."""
        started, host_seconds = time.perf_counter(), 0.0
        output: dict[str, Any] = {"model_output": {}, "loss": 0.0, "metrics": {}}
        one: MicroBatchPass | None = None

        for forward in request.importance_object.forwards(request.num_draws, log_probs=not request.importance_only):

            def make(micro_batch: TensorDict, local_input_ids: Tensor, forward: Forward = forward) -> Tap:
                nonlocal one
                one = one or self._micro_batch_pass(request, micro_batch, local_input_ids)
                return one.tap(forward)

            with torch.set_grad_enabled(forward.backward is not None), self._tapping(taps, make):
                _, output_of_forward = self.forward_step(micro_batch, loss_function=None, forward_only=True)  # type: ignore[attr-defined]
            if forward.log_probs:
                output, host_seconds = output_of_forward, elapsed(started)
            if taps.tap is not None and taps.tap.scalar is not None:
                taps.tap.scalar.backward()
            taps.tap = None
        assert one is not None
        one.scores.total(self._sum_over_sharing_ranks)
        # The forward for log-probs would have been made anyway; the rest is what importance costs.
        output["model_output"].update(score_fields(request, one.packed, one.scores, elapsed(started) - host_seconds))
        return output

    @contextmanager
    def _tapping(self, taps: ModelTaps, make: Callable[[TensorDict, Tensor], Tap]) -> Iterator[None]:
        self._tapped = taps, make
        try:
            yield
        finally:
            self._tapped = None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """verl's inputs; in a pass, also the tap that they are run under."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self._tapped is not None:
            taps, make = self._tapped
            taps.tap = make(micro_batch, inputs["input_ids"])
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """verl's log-probs and entropy; nothing when only the answer's rows were projected."""
        if self._tapped is not None and (tap := self._tapped[0].tap) is not None and tap.rows_only:
            return {}
        return super().prepare_model_outputs(  # type: ignore[misc]
            output, output_args, micro_batch, logits_processor_func
        )

    def answer_logits_of(self, micro_batch: TensorDict, row_N: Tensor) -> Tensor:
        """Logits of some packed positions of a micro-batch, `[N, V]`, on every rank that shares its sequences.

        One forward through verl's own `forward_step`, without a graph.
        """
        read: list[Tensor] = []
        here_N = row_N

        def make(micro_batch: TensorDict, local_input_ids: Tensor) -> Tap:
            nonlocal here_N
            local_N = self._local_positions(micro_batch, local_input_ids)[row_N]
            here_N = local_N >= 0
            return Tap(local_N[here_N], lambda project, hidden_NH: read.append(project(hidden_NH)))

        with torch.no_grad(), ModelTaps(self.module) as taps, self._tapping(taps, make):
            self.forward_step(micro_batch, loss_function=None, forward_only=True)  # type: ignore[attr-defined]
        logits_NV = read[0].new_zeros(len(row_N), read[0].shape[-1])
        logits_NV[here_N] = read[0]
        return self._sum_over_sharing_ranks(logits_NV)

    def _way_back(self) -> Callable[[], object] | None:
        return getattr(self.module, "reset_iter_state", None)  # FSDP2's, of torch 2.13; FSDP1 has none

    # ---- where things are

    def _micro_batch_pass(self, request: Request, micro_batch: TensorDict, local_input_ids: Tensor) -> MicroBatchPass:
        local_T, input_ids = self._local_positions(micro_batch, local_input_ids), micro_batch["input_ids"]
        packed = Packed(input_ids.values(), micro_batch[SEQUENCE_SEGMENTS].values(), input_ids.offsets())
        layout = Layout(local_T, local_T, local_input_ids.numel(), sum_over_sequence_ranks=self._sum_over_sharing_ranks)
        return MicroBatchPass(request, packed, layout)

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

    # ---- what this engine is

    def _sum_over_sharing_ranks(self, tensor: Tensor) -> Tensor:
        if self.use_ulysses_sp:
            distributed.all_reduce(tensor, group=self.ulysses_parallel_group)
        return tensor

    def _check_served(self, request: Request) -> None:
        if request.importance_object.copies is not None and hasattr(unwrapped(self.module).config, "vision_config"):
            raise UnsupportedModelError(
                f"algorithm.oar.importance={request.importance} with a vision-language model: masked copies carry no "
                f"images; allowed: {without_copies()}"
            )
        if self.token_bytes is not None:
            return
        check_model(self.module)
        if self.use_ulysses_sp and hasattr(unwrapped(self.module).config, "vision_config"):
            raise UnsupportedModelError(
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size > 1 with a vision-language model: "
                "verl slices its inputs after the embeddings, where OAR cannot follow; allowed: 1"
            )


def register() -> None:
    """Called once verl's FSDP engines are imported, and so in its registry."""
    register_engine(OarFSDPMixin, "fsdp", "fsdp2")
