"""verl's Megatron engine with importance: log-probs, entropy and importance from one run of the pipeline schedule.

`importance_pass.py` chooses the rows and makes the result's fields; this runs the forwards of `passes.gradient`. Megatron's
schedules run forward and backward of all micro-batches in an order of their own, so each `Forward` of an importance is one
whole schedule. A clean forward and a noisy one cannot share a schedule: the gradient of the noisy one needs the clean
distribution, which exists on the last stage only when that micro-batch has gone through the whole pipeline.

Two of verl's methods are overridden, and act only during such a pass: `forward_step`, to say what a forward is for and to
hand the schedule the tap's scalar for a loss, and `_lm_head_logits_processor`, to skip log-probs that nobody asked for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import get_model_config
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name

from oar_plugin.credit.importance import Forward, of_engines, without_copies
from oar_plugin.credit.vocabulary import VocabularyShard
from oar_plugin.hosts.verl.importance_pass import ImportancePass, elapsed, register_engine, score_fields
from oar_plugin.hosts.verl.segments import SEQUENCE_SEGMENTS
from oar_plugin.passes.gradient import Layout, MicroBatchPass, Packed, Scores
from oar_plugin.passes.megatron_taps import MegatronTaps, unwrapped
from oar_plugin.passes.request import Request
from oar_plugin.passes.tap import Tap, UnsupportedModelError
from oar_plugin.passes.taps import check_logits

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_ROW = "oar_row"  # int64 [B]: dynamic batching reorders the rows


@dataclass
class _Schedules:
    """The schedules of one importance pass: what outlives their micro-batches."""

    request: Request
    taps: MegatronTaps
    first: list[int]  # where each row of the batch begins in `scores`, and the end of the last
    scores: Scores  # of the batch, as far as this rank has computed them
    forward: Forward  # what the schedule under way is for
    forward_seconds: float = 0.0  # spent in forwards that gave log-probs, where that can be told (see `_score`)
    # By their rows; they outlive a schedule, for what a clean forward leaves to a noisy one.
    micro_batches: dict[tuple[int, ...], MicroBatchPass] = field(default_factory=dict)


class OarMegatronMixin(ImportancePass):
    """Importance for verl's Megatron engine. Put it before the engine in the list of bases."""

    # What the host's engine provides.
    module: list[nn.Module]
    tf_config: "TransformerConfig"
    peft_cls: Any
    forward_backward_batch: Callable[..., dict[str, Any]]

    _schedules: _Schedules | None = None

    def _score(self, data: TensorDict, request: Request) -> dict[str, Any]:
        """Scores of every row on every rank; log-probs and entropy on the ranks where verl has them.

        The seconds are what importance adds to the forward that log-probs need anyway. In a pipeline, where stages wait for
        one another, a fused forward cannot be told from its backward: there they are an upper bound, the whole schedule.
        """
        self._limit_micro_batches(data)
        data[_ROW] = torch.arange(len(data))
        device = torch.device(get_device_id())
        input_ids = data["input_ids"].to(device)
        packed = Packed(input_ids.values(), data[SEQUENCE_SEGMENTS].values().to(device), input_ids.offsets())
        scores = Scores(request.importance_object, len(packed.token_T), device)
        started = time.perf_counter()
        output: dict[str, Any] = {}
        forwards = request.importance_object.forwards(request.num_draws, log_probs=not request.importance_only)
        with MegatronTaps(self.module) as taps:
            schedules = _Schedules(request, taps, data["input_ids"].offsets().tolist(), scores, forwards[0])
            self._schedules = schedules
            try:
                for forward in forwards:
                    schedules.forward = forward
                    differentiates = forward.backward is not None
                    with torch.set_grad_enabled(differentiates):
                        result = self.forward_backward_batch(data, None, forward_only=not differentiates)
                    output = output or result
                    if forward.log_probs and not differentiates:
                        schedules.forward_seconds = elapsed(started)
            finally:
                self._schedules = None
        self._total_scores(scores)
        seconds = elapsed(started) - schedules.forward_seconds
        output.setdefault("model_output", {}).update(score_fields(request, packed, scores, seconds))
        return output

    # ---- verl's engine, during a pass

    def forward_step(
        self,
        batch_iter: Iterator[TensorDict],
        model: nn.Module,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Any,
    ) -> Any:
        """verl's forward of one micro-batch; in a pass, with taps and with the tap's scalar for a loss."""
        step = partial(
            super().forward_step,  # type: ignore[misc]
            model=model,
            logits_processor_func=logits_processor_func,
            postprocess_micro_batch_func=postprocess_micro_batch_func,
        )
        schedules, chunk = self._schedules, unwrapped(model)
        if schedules is None or not (chunk.pre_process or chunk.post_process):
            return step(batch_iter)
        started = time.perf_counter()
        micro_batch = next(batch_iter)
        rows = tuple(micro_batch[_ROW].tolist())
        micro_batch = micro_batch.to(get_device_id())
        tap = self._micro_batch_pass(rows, micro_batch, schedules).tap(schedules.forward)
        schedules.taps.tap = tap
        try:
            output, _ = step(iter([micro_batch]))
        finally:
            schedules.taps.tap = None
        return output, partial(self._finish, schedules, tap, micro_batch, started)

    def _lm_head_logits_processor(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """verl's log-probs and entropy; nothing when only the answer's rows were projected."""
        if self._schedules is not None and not self._schedules.forward.log_probs:
            return {}
        return super()._lm_head_logits_processor(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def _finish(
        schedules: _Schedules, tap: Tap, micro_batch: TensorDict, started: float, output: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        """What the schedule calls on the last stage after a forward: the scalar to differentiate, and verl's outputs."""
        scalar = tap.scalar
        if scalar is None:  # a forward without a backward
            scalar = torch.zeros((), device=get_device_id())
        elif schedules.forward.log_probs and parallel_state.get_pipeline_model_parallel_world_size() == 1:
            schedules.forward_seconds += elapsed(started)
        # The schedule multiplies a loss by the context-parallel size and divides it by the number of micro-batches.
        scale = micro_batch["num_micro_batch"] / parallel_state.get_context_parallel_world_size()
        # 1.0: verl's, where there is no loss
        detached = {name: value.detach() for name, value in output.items()}
        return scalar * scale, {"loss": 1.0, "metrics": {}, "model_output": detached}

    # ---- where things are

    def _micro_batch_pass(
        self, rows: tuple[int, ...], micro_batch: TensorDict, schedules: _Schedules
    ) -> MicroBatchPass:
        if rows not in schedules.micro_batches:
            input_ids, first = micro_batch["input_ids"], schedules.first
            place_T = torch.cat([torch.arange(*first[row : row + 2]) for row in rows]).to(get_device_id())
            packed = Packed(input_ids.values(), micro_batch[SEQUENCE_SEGMENTS].values(), input_ids.offsets())
            schedules.micro_batches[rows] = MicroBatchPass(
                schedules.request, packed, self._layout(micro_batch), schedules.scores, place_T
            )
        return schedules.micro_batches[rows]

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
            projection: ColumnParallelLinear = last.output_layer
            vocabulary = VocabularyShard(
                start=group.rank() * projection.output_size_per_partition,
                total=partial(_all_reduced, group),
                largest=partial(_all_reduced, group, op=distributed.ReduceOp.MAX),
            )
        return Layout(
            local_T,
            embedding_T,
            size,
            vocabulary,
            max(0, self.model_config.hf_config.vocab_size - vocabulary.start),
            partial(_all_reduced, parallel_state.get_context_parallel_group()),
        )

    def _local_positions(self, micro_batch: TensorDict) -> tuple[Tensor, int]:
        """Where each packed token is in this rank's flattened hidden states `[s * b]` (before sequence parallelism).

        verl's own packing says so: it is given the numbers 1 .. T for token ids, and 0 is its padding.

        Returns:
            int64 `[T]`, -1 where another context-parallel rank holds the token; and s * b.
        """
        input_ids = micro_batch["input_ids"]
        number_T = torch.arange(1, len(input_ids.values()) + 1, device=input_ids.device)
        numbers = torch.nested.nested_tensor_from_jagged(number_T, input_ids.offsets())
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

    def _total_scores(self, scores: Scores) -> None:
        """Scores of all ranks that share the batch, on each of them."""
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            # Each tensor-parallel rank of the last stage has read all of its rows, and without sequence parallelism each
            # has all embeddings.
            scores.reads_NT.zero_()
            if not get_model_config(self.module[0]).sequence_parallel:
                scores.score_KT.zero_()
        scores.total(self._sum_over_sharing_ranks)

    def _sum_over_sharing_ranks(self, tensor: Tensor) -> Tensor:
        over_context = _all_reduced(parallel_state.get_context_parallel_group(), tensor)
        return _all_reduced(parallel_state.get_model_parallel_group(), over_context)

    # ---- what this engine is

    def _micro_batches_divided_by(self) -> int:
        if (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1) == 1:
            return 1
        return self.tf_config.microbatch_group_size_per_vp_stage

    def _check_served(self, request: Request) -> None:
        if request.importance_object.copies is not None:
            raise UnsupportedModelError(
                f"algorithm.oar.importance={request.importance} in a Megatron actor: masked copies were not built for it; "
                f"allowed: {without_copies()}, or {of_engines()} with algorithm.oar.perturbation.backend=rollout"
            )
        if self.token_bytes is not None:
            return
        if self.peft_cls is not None:
            raise UnsupportedModelError(
                "actor_rollout_ref.model.lora with Megatron: not served by OAR; allowed: actor_rollout_ref.model.lora.rank=0"
            )
        check_chunks(self.module)
        check_logits(self.model_config.hf_config)


def check_chunks(chunks: Sequence[nn.Module]) -> None:
    """Refuse models that `MegatronTaps` would read wrongly.

    Raises:
        UnsupportedModelError: names what is not served, and what to change.
    """
    for chunk in chunks:
        model = unwrapped(chunk)
        if type(model) is not GPTModel:
            raise UnsupportedModelError(
                f"{type(model).__name__}: under Megatron, OAR serves megatron.core's GPTModel only (no vision-language, "
                "Mamba or otherwise derived models); use actor_rollout_ref.actor.strategy=fsdp2"
            )
        config: Any = get_model_config(model)
        refused = {
            "num_moe_experts": "mixture-of-experts layers were not tested; use another model",
            "mtp_num_layers": "set actor_rollout_ref.model.mtp.enable=False",
            "fp8": "a backward in fp8 moves its scaling history; leave override_transformer_config.fp8 out",
            "fp4": "leave override_transformer_config.fp4 out",
            "overlap_moe_expert_parallel_comm": "its schedule replaces the forward that OAR hooks; set it to False",
            "hybrid_context_parallel": "its schedule replaces the forward that OAR hooks; set it to False",
            "defer_embedding_wgrad_compute": "it keeps activations of every forward; set it to False",
            "use_mup": "it scales the logits after the projection that OAR hooks; set it to False",
            "experimental_attention_variant": "its context-parallel layout was not tested; use another model",
        }
        for name, advice in refused.items():
            value = getattr(config, name, None)
            if value not in (None, False, 0):
                raise UnsupportedModelError(
                    f"{name}={value} in Megatron's transformer config: not served by OAR; {advice}"
                )
        graphs = getattr(config, "cuda_graph_impl", "none")
        if graphs != "none":
            raise UnsupportedModelError(
                f"cuda_graph_impl={graphs} in Megatron's transformer config: hooks do not run inside captured graphs; "
                "set it to none"
            )
        if model.position_embedding_type == "learned_absolute":
            raise UnsupportedModelError(
                "position_embedding_type=learned_absolute: Megatron adds it inside the embedding that OAR differentiates; "
                "use a model with rotary positions"
            )
        projection: ColumnParallelLinear | None = model.output_layer if model.post_process else None
        if projection is not None and (type(projection) is not ColumnParallelLinear or projection.bias is not None):
            raise UnsupportedModelError(
                f"{type(projection).__name__} as vocabulary projection: OAR serves megatron.core's plain "
                "ColumnParallelLinear without bias; use a model without adapters or transforms there"
            )


def _all_reduced(group: Any, tensor: Tensor, op: Any = distributed.ReduceOp.SUM) -> Tensor:
    if group.size() > 1:
        distributed.all_reduce(tensor, op=op, group=group)
    return tensor


def register() -> None:
    """Called once verl's Megatron engine is imported, and so in its registry."""
    if get_device_name() != "npu":  # verl's engine there is another class, MindSpeed's
        register_engine(OarMegatronMixin, "megatron")
