"""verl's Megatron engine with importance: verl's own schedule, under hooks.

Megatron's schedules run forward and backward of all micro-batches in an order of their own, so each `Forward` of a work is one
whole schedule. A noise-free and a perturbed forward cannot share a schedule: the perturbed forward's gradient needs the
noise-free distribution, which the last stage has only when the micro-batch has gone through the whole pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from oar_plugin.credit.importance import Forward
from oar_plugin.credit.vocabulary import VocabularyShard
from oar_plugin.hosts.verl.importance_pass import ROW, ImportancePass, register_engines
from oar_plugin.hosts.verl.settings import REFUSED
from oar_plugin.passes.gradient import Layout
from oar_plugin.passes.host import Work
from oar_plugin.passes.megatron_taps import MegatronTaps, unwrapped
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import Tap, UnsupportedModelError, logit_changes

_ROUTES = "routed_experts"  # verl's field for router replay
_UNSET = (None, False, 0, "none")  # of an attribute of a transformer config
_INSTEAD = "use actor_rollout_ref.actor.strategy=fsdp2"


@dataclass
class _Schedules:
    work: Work
    taps: MegatronTaps
    forward: Forward  # the forward that the current schedule runs
    begun: dict[tuple[int, ...], Any] = field(
        default_factory=dict
    )  # micro-batches by rows, in the order of the first schedule


class OarMegatronMixin(ImportancePass):
    module: list[nn.Module]
    tf_config: TransformerConfig
    forward_backward_batch: Callable[..., dict[str, Any]]

    _schedules: _Schedules | None = None

    def _read(self, data: TensorDict, work: Work) -> dict[str, Any]:
        with self._running(work) as schedules:
            output = self._infer(data)
        offsets = data["input_ids"].offsets().tolist()
        log_prob_T = self._log_probs_everywhere(output.get("model_output", {}).get("log_probs"), offsets[-1]).roll(1)
        for rows, begun in schedules.begun.items():
            begun.end(torch.cat([log_prob_T[offsets[row] : offsets[row + 1]] for row in rows]))
        return output

    def _infer(self, data: TensorDict) -> dict[str, Any]:
        records, output = self._records_routes(data), super()._infer(data)
        if records:  # for the gradient pass
            data[_ROUTES] = self._recorded_routes(output)
        return output

    def _run(self, data: TensorDict, work: Work) -> None:
        with self._running(work) as schedules:
            for forward in work.forwards:
                schedules.forward = forward
                differentiates = forward.backward is not None
                with torch.set_grad_enabled(differentiates):
                    self.forward_backward_batch(data, None, forward_only=not differentiates)
        for begun in schedules.begun.values():
            begun.end(None)

    @contextmanager
    def _running(self, work: Work) -> Iterator[_Schedules]:
        with MegatronTaps(self.module, work.reads_only) as taps:
            self._schedules = _Schedules(work, taps, work.forwards[0])
            try:
                yield self._schedules
            finally:
                self._schedules = None

    def _records_routes(self, data: TensorDict) -> bool:
        """Whether verl records experts (mode R2), in a forward without a backward. Later forwards replay these routes."""
        replays = tu.get_non_tensor_data(data, key="enable_routing_replay", default=False)
        return bool(replays) and self.engine_config.router_replay.mode == "R2" and data.get(_ROUTES, None) is None

    @staticmethod
    def _recorded_routes(output: dict[str, Any]) -> Tensor:
        """Routes, int16 nested `[T, layers, experts per token]`, on every rank; verl has them on the last stage."""
        routes = [output.get("model_output", {}).get(_ROUTES)]
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            distributed.broadcast_object_list(routes, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        return routes[0]

    def forward_step(
        self, batch_iter: Any, model: nn.Module, logits_processor_func: Any, postprocess_micro_batch_func: Any
    ) -> Any:
        """verl's forward of one micro-batch; in a work it runs under a tap, whose scalar is the loss."""
        functions = logits_processor_func, postprocess_micro_batch_func
        step: Callable[..., Any] = super().forward_step  # type: ignore[misc]
        if (schedules := self._schedules) is None:
            return step(batch_iter, model, *functions)
        micro_batch: TensorDict = next(batch_iter)
        rows = tuple(micro_batch[ROW].tolist())
        if rows not in schedules.begun:
            schedules.begun[rows] = schedules.work.begin(rows, self._layout(micro_batch))
        tap = schedules.taps.tap = schedules.begun[rows].tap(schedules.forward)
        try:
            output, finish = step(iter([micro_batch]), model, *functions)
        finally:
            schedules.taps.tap = None
        return output, finish if schedules.forward.log_probs else partial(self._finish, tap, micro_batch)

    def _lm_head_logits_processor(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """verl's log-probs and entropy; nothing if the tap projects only some rows."""
        if self._schedules is not None and not self._schedules.forward.log_probs:
            return {}
        return super()._lm_head_logits_processor(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def _finish(tap: Tap, micro_batch: TensorDict, output: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """The scalar to differentiate and verl's outputs. The schedule calls this on the last stage after a forward."""
        # A forward without a backward has no scalar.
        scalar = torch.zeros((), device=get_device_id()) if tap.scalar is None else tap.scalar
        # The schedule multiplies a loss by the context-parallel size and divides it by the number of micro-batches.
        scale = micro_batch["num_micro_batch"] / parallel_state.get_context_parallel_world_size()
        detached = {name: value.detach() for name, value in output.items()}
        # 1.0 is verl's loss where there is none.
        return scalar * scale, {"loss": 1.0, "metrics": {}, "model_output": detached}

    def _layout(self, micro_batch: TensorDict) -> Layout:
        local_T, size = self._local_positions(micro_batch)
        embedding_T = local_T
        config: TransformerConfig = get_model_config(self.module[0])
        if config.sequence_parallel:
            size //= parallel_state.get_tensor_model_parallel_world_size()
            embedding_T = local_T - parallel_state.get_tensor_model_parallel_rank() * size
            held_T = (local_T >= 0) & (embedding_T >= 0) & (embedding_T < size)
            embedding_T = torch.where(held_T, embedding_T, -1)
        group = parallel_state.get_tensor_model_parallel_group()
        vocabulary = VocabularyShard()
        last: GPTModel | None = next((chunk for chunk in map(unwrapped, self.module) if chunk.post_process), None)
        if group.size() > 1 and last is not None:
            vocabulary = VocabularyShard(
                start=group.rank() * last.output_layer.output_size_per_partition,
                total=partial(_all_reduced, group),
                largest=partial(_all_reduced, group, op=distributed.ReduceOp.MAX),
            )
        columns = max(0, self.model_config.hf_config.vocab_size - vocabulary.start)
        total = partial(_all_reduced, parallel_state.get_context_parallel_group())
        # Each tensor-parallel rank of the last stage reads all rows. Without sequence parallelism each has all embeddings.
        again = group.rank() > 0, group.rank() > 0 and not config.sequence_parallel
        return Layout(local_T, embedding_T, size, torch.device(get_device_id()), vocabulary, columns, total, *again)

    def _local_positions(self, micro_batch: TensorDict) -> tuple[Tensor, int]:
        """`Layout.local_T`, and the length of this rank's flattened hidden states `[s * b]` (before sequence parallelism).

        It comes from verl's own packing of the numbers 1 .. T in place of token ids; 0 is verl's padding.
        """
        input_ids = micro_batch["input_ids"]
        number_T = torch.arange(1, len(input_ids.values()) + 1)
        numbers = torch.nested.nested_tensor_from_jagged(number_T, input_ids.offsets().cpu())
        if self.engine_config.use_remove_padding:
            bucket = self.engine_config.pad_to_length_bucket if self.engine_config.pad_to_length else None
            local = preprocess_thd_engine(numbers, pad_to_length_bucket=bucket)[0]
        else:
            longest = tu.get_non_tensor_data(data=micro_batch, key="forced_max_seqlen", default=None)
            local = preprocess_bshd_engine(numbers, forced_max_seqlen=longest)[0]
        flat = local.t().flatten()
        local_T = torch.full_like(number_T, -1)
        local_T[flat[flat > 0] - 1] = (flat > 0).nonzero()[:, 0]
        return local_T, len(flat)

    def _log_probs_everywhere(self, log_probs: Tensor | None, num_tokens: int) -> Tensor:
        """verl's log-probs, float32 `[T]`, on every rank; verl has them on the last stage."""
        log_prob_T = torch.zeros(num_tokens, device=get_device_id())
        groups = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        if log_probs is not None and not any(groups):
            log_prob_T += log_probs.values().to(log_prob_T)
        return self._sum_over_sharing_ranks(log_prob_T)

    def _sum_over_sharing_ranks(self, tensor: Tensor) -> Tensor:
        over_context = _all_reduced(parallel_state.get_context_parallel_group(), tensor)
        return _all_reduced(parallel_state.get_model_parallel_group(), over_context)

    def _micro_batch_multiple(self) -> int:
        stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        return self.tf_config.microbatch_group_size_per_vp_stage if stages > 1 else 1

    def _check_supported(self, data: TensorDict, request: Request) -> None:
        """The configuration decides, without the trial of `oar_plugin.passes.trial`: a forward is a whole schedule, whose
        logits go to verl in shards. It can decide: `check_chunks` admits megatron-core's own `GPTModel` and projection alone.
        """
        check_chunks(self.module)
        if changes := logit_changes(self.model_config.hf_config):
            fault = f"the model changes its logits after the vocabulary projection ({changes})"
            raise UnsupportedModelError(f"{fault}, which is not supported under Megatron: {_INSTEAD}")


def check_chunks(chunks: Sequence[nn.Module]) -> None:
    """Refuse models that `MegatronTaps` cannot read correctly. UnsupportedModelError: what is refused, and what to change."""
    for chunk in chunks:
        model: GPTModel = unwrapped(chunk)
        if type(model) is not GPTModel:
            fault = "OAR supports megatron.core's GPTModel only (no vision-language, Mamba or otherwise derived models)"
            raise UnsupportedModelError(f"{type(model).__name__}: under Megatron, {fault}; {_INSTEAD}")
        config: Any = get_model_config(model)
        for refused in REFUSED["megatron"]:
            name = refused.in_model or ""
            if (value := getattr(config, name, None)) not in _UNSET:
                raise UnsupportedModelError(refused.fault(value, name))
        if model.position_embedding_type == "learned_absolute":
            fault = "Megatron adds it inside the embedding that OAR differentiates; use a model with rotary positions"
            raise UnsupportedModelError(f"position_embedding_type=learned_absolute: {fault}")
        projection: ColumnParallelLinear | None = model.output_layer if model.post_process else None
        if projection is not None and (type(projection) is not ColumnParallelLinear or projection.bias is not None):
            fault = "OAR supports megatron.core's plain ColumnParallelLinear without bias"
            allowed = "use a model without adapters or transforms there"
            raise UnsupportedModelError(f"{type(projection).__name__} as vocabulary projection: {fault}; {allowed}")


def _all_reduced(group: Any, tensor: Tensor, op: Any = distributed.ReduceOp.SUM) -> Tensor:
    if group.size() > 1:
        distributed.all_reduce(tensor, op=op, group=group)
    return tensor


# At import, like verl's own decorators: either `plugin`'s hook or a program imports this module first.
if get_device_name() != "npu":  # there verl's engine is MindSpeed's
    register_engines(OarMegatronMixin, MegatronEngineWithLMHead, "megatron")
