"""verl's FSDP and FSDP2 engines with importance: one forward for log-probs, entropy and importance.

Masked copies, and `passes.gradient` through verl's own `forward_step`, which makes a forward's inputs and runs the model.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from transformers import DynamicCache
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from oar_plugin.credit.importance import Forward, named
from oar_plugin.hosts.verl.importance_pass import ROW, ImportancePass, packed_of, register_engines
from oar_plugin.passes.gradient import Layout, MicroBatchPass
from oar_plugin.passes.masked_copies import MaskedCopies, Reduce, Result
from oar_plugin.passes.request import IMPORTANCE, Request, nested
from oar_plugin.passes.taps import ModelTaps, Tap, UnsupportedModelError, check_model, logit_changes, unwrapped
from oar_plugin.passes.trial import TOKENS, Reading, check_by_trial


class OarFSDPMixin(ImportancePass):
    module: nn.Module
    use_remove_padding: bool
    use_ulysses_sp: bool
    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: Any

    # Set only during OAR's forwards: see `_tapping`.
    _tapped: tuple[ModelTaps, Tensor, Callable[[Layout], Tap]] | None = None

    @property
    def _fused(self) -> bool:
        """Whether verl's forward ends in kernels that give log-probs and entropies, and no logits."""
        return bool(self.model_config.use_fused_kernels)

    def _score(self, data: TensorDict, request: Request) -> dict[str, Any]:
        data[ROW] = torch.arange(len(data))
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size)
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        # verl's activation offload works only in training. This pass recomputes these activations instead.
        checkpoint = self.model_config.enable_gradient_checkpointing or self.model_config.enable_activation_offload
        with ModelTaps(self.module, checkpoint, self._fused) as taps:
            outputs = [self._score_micro_batch(micro_batch, request, taps) for micro_batch in micro_batches]
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _score_micro_batch(self, micro_batch: TensorDict, request: Request, taps: ModelTaps) -> dict[str, Any]:
        packed, passes = packed_of(micro_batch), list[MicroBatchPass]()
        output: dict[str, Any] = {"model_output": {}, "loss": 0.0, "metrics": {}}

        def tap_at(forward: Forward, layout: Layout) -> Tap:
            if not passes:  # the first forward tells the layout
                passes.append(MicroBatchPass(request, packed, layout))
            return passes[0].tap(forward)

        for forward in request.forwards():
            tapped = self._tapping(taps, packed.offsets, partial(tap_at, forward))
            with tapped, taps.running(forward), self._switching(forward.log_probs):
                _, of_forward = self.forward_step(micro_batch, loss_function=None, forward_only=True)  # type: ignore[attr-defined]
                if forward.log_probs:
                    output = of_forward
        scores, log_probs = passes[0].scores, output["model_output"].get("log_probs")
        scores.total(self._sum_over_sharing_ranks)
        given = micro_batch, None if log_probs is None else log_probs.values()
        output["model_output"][IMPORTANCE] = self._field(request, packed, scores, *given)
        return output

    @contextlib.contextmanager
    def _tapping(self, taps: ModelTaps, offsets: Tensor, tap_at: Callable[[Layout], Tap]) -> Iterator[None]:
        """The next forward of verl's gets the tap that `tap_at` makes. `offsets`: of its sequences, on the CPU."""
        self._tapped = taps, offsets, tap_at
        try:
            yield
        finally:
            self._tapped = None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """Returns verl's inputs, and sets the tap of OAR's forwards: only here it is known where verl puts the tokens."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self._tapped is not None:
            taps, offsets, tap_at = self._tapped
            ids, total = inputs["input_ids"], self._sum_over_sharing_ranks
            local_T = self._local_positions(offsets, ids.shape[-1])
            taps.tap = tap_at(Layout(local_T, local_T, ids.numel(), ids.device, sum_over_sequence_ranks=total))
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """verl's log-probs and entropy; nothing if OAR reads logits alone, or projects only some rows. OAR's backward comes
        before them. On a GPU, with the graph beside them, this pass would have the peak of the step (docs/evidence/gpu.md).
        """
        if self._tapped is not None and (taps := self._tapped[0]).tap is not None:
            only = taps.tap.rows_only or isinstance(taps.tap, Reading)
            with torch.autocast(get_device_name(), enabled=False), self._switching(not only):
                taps.backward()
            if only:
                return {}
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]

    def _copies_importance(
        self, data: TensorDict, request: Request, segments: list[Tensor], scored_B: Tensor
    ) -> list[Tensor]:
        """Importance per row from masked copies, float32 `[L_i]`; zeros in rows outside of `scored_B`."""
        # The token budget of verl's log-prob pass.
        if self._is_dynamic(data):
            most = int(data["max_token_len_per_gpu"] * self.ulysses_sequence_parallel_size)
        else:
            most = int(data["micro_batch_size_per_gpu"]) * int(data["input_ids"].offsets().diff().max())
        copies = MaskedCopies(self.module, request, most)
        if self.use_ulysses_sp or self._fused:
            copies = _CopiesThroughVerl(self, data, request, most)
        input_ids = data["input_ids"].unbind()
        rows = scored_B.nonzero()[:, 0].tolist()
        wanted = {row: (input_ids[row].to(get_device_id()), segments[row]) for row in rows}
        # verl's `forward_step` runs the model in this autocast.
        dtype = getattr(self, "_autocast_dtype", torch.bfloat16)
        with torch.autocast(get_device_name(), dtype) if dtype != torch.float32 else contextlib.nullcontext():
            scored = copies.importance(wanted, self.max_over_ranks)
        return [scored.get(row, torch.zeros(len(segment))) for row, segment in enumerate(segments)]

    def read(self, micro_batch: TensorDict, row_N: Tensor | None = None, rows_only: bool = False) -> Reading:
        """Reads logits at packed positions of a micro-batch, by one forward of verl's without a graph. None: all positions."""
        offsets, fused = micro_batch["input_ids"].offsets().cpu(), None
        if self._fused:
            next_T = micro_batch["input_ids"].values().roll(-1)
            next_T[offsets[1:] - 1] = -1
            fused = micro_batch["temperature"], next_T.to(get_device_id())
        tap_at = partial(Reading, row_N=row_N, rows_only=rows_only, fused=fused)
        with torch.no_grad(), ModelTaps(self.module, fused=self._fused) as taps, self._tapping(taps, offsets, tap_at):
            self.forward_step(micro_batch, loss_function=None, forward_only=True)  # type: ignore[attr-defined]
            assert isinstance(taps.tap, Reading)
            return taps.tap

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
        images = hasattr(model.config, "vision_config")
        if images and request.importance_object.copies and not request.config.offloads:
            fault = f"a vision-language model: masked copies carry no images; allowed: {named(copies=False)}"
            raise UnsupportedModelError(f"algorithm.oar.importance={request.importance} with {fault}")
        if images and self.use_ulysses_sp:
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
            trials = [] if lacks_text else [self.read(like_row(data, text, sequences))]
            if lacks_text or not lacks_image:
                # Images need all of their tokens. Only the first logits are compared, because a row may be long.
                row = tu.index_select_tensor_dict(data, torch.tensor([image % len(rows)]))
                trials.append(self.read(row, torch.arange(min(TOKENS, row["input_ids"].values().numel()))))
            return trials

        check_by_trial(self.module, request, rows[text % len(rows)], read, self.max_over_ranks)


class _CopiesThroughVerl(MaskedCopies):
    """Masked copies through verl's own forward: under Ulysses and with fused kernels. Its inputs have no cache to share."""

    def __init__(self, engine: OarFSDPMixin, data: TensorDict, *arguments: Any) -> None:
        super().__init__(engine.module, *arguments)
        self._shares_prefix = False
        self.engine, self.template = engine, data

    def _forward(self, token_KT: Tensor, row_N: Tensor, cache: DynamicCache | None, reduce: Reduce[Result]) -> Result:
        self.tokens += token_KT.numel()
        micro_batch = like_row(self.template, 0, token_KT.unbind())
        # The ranks have added up the logits of all rows.
        return reduce(lambda logits_NV: logits_NV, self.engine.read(micro_batch, row_N, rows_only=True).tapped_NV)


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


def like_row(data: TensorDict, row: int, sequences: Sequence[Tensor]) -> TensorDict:
    """A micro-batch of other sequences, of text. verl's other fields are those of a row: no log-probs are read."""
    micro_batch = tu.index_select_tensor_dict(data, torch.full((len(sequences),), row))
    micro_batch["input_ids"] = nested(sequences)
    shape = data["position_ids"].values().shape[:-1]  # with images also time, height and width, equal for text
    positions = (torch.arange(len(one), device=one.device).expand(*shape, -1).contiguous() for one in sequences)
    micro_batch["position_ids"] = nested(positions)
    tu.pop(micro_batch, key="multi_modal_inputs", default=None)
    return micro_batch


register = partial(register_engines, OarFSDPMixin, FSDPEngineWithLMHead, "fsdp", "fsdp2")
register()  # at import, like verl's own decorators: either `plugin`'s hook or a program imports this module first
