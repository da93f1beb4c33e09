"""verl's FSDP and FSDP2 engines with importance.

The read is verl's own forward, under hooks. Copies and rows with a backward call verl's `prepare_model_inputs`, which makes the
inputs of every layout, and the module, in verl's autocast.
"""

import contextlib
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from oar_plugin.hosts.verl.importance_pass import ROW, ImportancePass, like_rows, nested_positions, register_engines
from oar_plugin.passes.gradient import Layout
from oar_plugin.passes.host import Work
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps, UnsupportedModelError, check_model, logit_changes, unwrapped
from oar_plugin.passes.trial import TOKENS, Reading, check_by_trial


class OarFSDPMixin(ImportancePass):
    module: nn.Module
    use_remove_padding: bool
    use_ulysses_sp: bool
    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: Any

    _reading: tuple[ModelTaps, Work] | None = None  # during a read

    @property
    def _fused(self) -> bool:
        """Whether verl's forward ends in kernels that give log-probs and entropies, and no logits."""
        return bool(self.model_config.use_fused_kernels)

    def _read(self, data: TensorDict, work: Work) -> dict[str, Any]:
        with ModelTaps(self.module, fused=self._fused, reads_only=True) as taps:
            self._reading = taps, work
            try:
                return self._infer(data)
            finally:
                self._reading = None

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """verl's forward of one micro-batch; in a read, hooks act on its tap."""
        step = super().forward_step  # type: ignore[misc]
        if self._reading is None:
            return step(micro_batch, loss_function=loss_function, forward_only=forward_only)
        (taps, work), rows = self._reading, micro_batch[ROW].tolist()
        (forward,) = work.forwards
        device_batch = micro_batch.to(get_device_id())
        inputs, _ = self.prepare_model_inputs(device_batch)  # type: ignore[attr-defined]
        begun = work.begin(rows, self._layout(micro_batch["input_ids"].offsets().cpu(), inputs["input_ids"]))
        with taps.running(forward):
            taps.tap = begun.tap(forward)
            result = step(device_batch, loss_function=loss_function, forward_only=forward_only)
        # verl has each token's log-prob at the token before.
        begun.end(result[1]["model_output"]["log_probs"].values().roll(1))
        return result

    def _run(self, data: TensorDict, work: Work) -> None:
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size)
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        micro_batches, _ = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        # verl's activation offload works only in training. This pass recomputes these activations instead.
        checkpoint = self.model_config.enable_gradient_checkpointing or self.model_config.enable_activation_offload
        with ModelTaps(self.module, checkpoint, self._fused, work.reads_only) as taps:
            for micro_batch in micro_batches:
                offsets, rows = micro_batch["input_ids"].offsets().cpu(), micro_batch[ROW].tolist()
                inputs, _ = self.prepare_model_inputs(micro_batch.to(get_device_id()))  # type: ignore[attr-defined]
                begun = work.begin(rows, self._layout(offsets, inputs["input_ids"]))
                for forward in work.forwards:
                    with taps.running(forward):
                        taps.tap = begun.tap(forward)
                        with self._autocast():
                            self.module(**inputs, use_cache=False)
                begun.end(None)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What verl's `forward_step` runs the model in."""
        dtype = getattr(self, "_autocast_dtype", torch.bfloat16)
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype)

    def _layout(self, offsets: Tensor, input_ids: Tensor) -> Layout:
        """Where this rank has the tokens of sequences with these offsets, on the CPU. `input_ids`: those of the model."""
        local_T, total = self._local_positions(offsets, input_ids.shape[-1]), self._sum_over_sharing_ranks
        return Layout(local_T, local_T, input_ids.numel(), input_ids.device, sum_over_sequence_ranks=total)

    def _trial(self, micro_batch: TensorDict, row_N: Tensor | None = None) -> Reading:
        """Reads logits at packed positions of a micro-batch, by one forward without a graph. None: all positions."""
        offsets, fused = micro_batch["input_ids"].offsets().cpu(), None
        if self._fused:
            next_T = micro_batch["input_ids"].values().roll(-1)
            next_T[offsets[1:] - 1] = -1
            fused = micro_batch["temperature"], next_T.to(get_device_id())
        inputs, _ = self.prepare_model_inputs(micro_batch.to(get_device_id()))  # type: ignore[attr-defined]
        reading = Reading(self._layout(offsets, inputs["input_ids"]), row_N, fused)
        with torch.no_grad(), ModelTaps(self.module, fused=self._fused) as taps, self._autocast():
            taps.tap = reading
            self.module(**inputs, use_cache=False)
        return reading

    def _local_positions(self, offsets: Tensor, width: int) -> Tensor:
        """`Layout.local_T` of a micro-batch with these offsets, on the CPU; `width` is the length of this rank's inputs."""
        packed_T = torch.arange(int(offsets[-1]))
        if self.use_remove_padding:
            # Packed. Under Ulysses, each rank holds one slice of the pack. The last slice ends with the padding.
            rank = distributed.get_rank(self.ulysses_parallel_group) if self.use_ulysses_sp else 0
            local_T = packed_T - rank * width
            return torch.where((local_T >= 0) & (local_T < width), local_T, -1)
        response_T = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        return response_T * width + packed_T - offsets[response_T]

    def _sum_over_sharing_ranks(self, tensor: Tensor) -> Tensor:
        if self.use_ulysses_sp:
            distributed.all_reduce(tensor, group=self.ulysses_parallel_group)
        return tensor

    def _check_supported(self, data: TensorDict, request: Request) -> None:
        check_model(self.module)
        model: Any = unwrapped(self.module)
        if self._fused and (fault := fused_fault(model)):
            raise UnsupportedModelError(f"actor_rollout_ref.model.use_fused_kernels=True with {fault}; allowed: False")
        if hasattr(model.config, "vision_config") and self.use_ulysses_sp:
            key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
            fault = "verl slices sequences after the embeddings, which OAR does not support; allowed: 1"
            raise UnsupportedModelError(f"{key} > 1 with a vision-language model: {fault}")

        # The first row of text, and the first with images; some processors give text the types of its tokens. The trial runs on
        # what every rank has: ranks must run equal forwards, and verl cannot run some of these models without an image.
        inputs, rows = tu.get(data, "multi_modal_inputs", [{}] * len(data)), data["input_ids"].unbind()
        has_images = [any("token_type_ids" not in name for name in one or {}) for one in inputs]
        text, image = ([*has_images, wanted].index(wanted) for wanted in (False, True))
        lacks_text, lacks_image = (bool(self.max_over_ranks(int(row == len(rows)))) for row in (text, image))

        def read(sequences: list[Tensor]) -> list[Reading]:
            trials = [] if lacks_text else [self._trial(like_text(data, text, sequences))]
            if lacks_text or not lacks_image:
                # Images need all of their tokens. Only the first logits are compared, because a row may be long.
                row = tu.index_select_tensor_dict(data, torch.tensor([image % len(rows)]))
                trials.append(self._trial(row, torch.arange(min(TOKENS, row["input_ids"].values().numel()))))
            return trials

        check_by_trial(self.module, request, rows[text % len(rows)], read, self.max_over_ranks)


def fused_fault(model: Any) -> str:
    """What verl's fused kernels cannot compute of a model, and why; empty if there is nothing."""
    if changes := logit_changes(model.config):
        what = f"a model that changes its logits after the vocabulary projection ({changes})"
        return f"{what}: the kernels leave this out"
    head = unwrapped(model.get_output_embeddings())
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return "a bias or an adapter on the vocabulary projection: the kernels leave it out"
    inner = getattr(model, "get_base_model", lambda: model)()
    if "shift_labels" not in inspect.signature(type(inner).forward).parameters:
        return f"{type(inner).__name__}: verl has no fused forward for it with this fused_kernel_options.impl_backend"
    return ""


def like_text(data: TensorDict, row: int, sequences: Sequence[Tensor]) -> TensorDict:
    """A micro-batch of other sequences, of text. verl's other fields are those of a row: no log-probs are read."""
    micro_batch = like_rows(data, [row] * len(sequences), sequences)
    shape = data["position_ids"].values().shape[:-1]  # with images also time, height and width, equal for text
    positions = (torch.arange(len(one), device=one.device).expand(*shape, -1).contiguous() for one in sequences)
    micro_batch["position_ids"] = nested_positions(list(positions))
    tu.pop(micro_batch, key="multi_modal_inputs", default=None)
    return micro_batch


register = partial(register_engines, OarFSDPMixin, FSDPEngineWithLMHead, "fsdp", "fsdp2")
register()  # at import, like verl's own decorators: either `plugin`'s hook or a program imports this module first
