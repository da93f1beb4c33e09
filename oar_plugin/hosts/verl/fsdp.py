"""verl's FSDP and FSDP2 engines with importance: one forward for log-probs, entropy and importance.

The subclass acts only on a batch that carries a request; every other call goes to verl's own code untouched. With one, the
rows that are to be scored come first and get a forward with a graph and a backward to the input embeddings; the other
rows get verl's plain no-gradient forward.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_torch_device, get_vendor
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.micro_batch import MicroBatchScorer
from oar_plugin.hosts.request import IMPORTANCE, REPORT, REQUEST, SEGMENTS, Request
from oar_plugin.hosts.taps import ModelTaps, UnsupportedModelError, check_model, unwrapped
from oar_plugin.hosts.verl import cpu
from oar_plugin.hosts.verl.segments import SEQUENCE_SEGMENTS, segment_batch, sequence_segments
from oar_plugin.tokens import TokenBytes

_SECONDS = "oar_seconds"


class OarFSDPMixin:
    """Importance for a verl FSDP engine. Put it before the engine in the list of bases."""

    # What the host's engine provides.
    module: nn.Module
    model_config: Any
    engine_config: Any
    use_remove_padding: bool
    use_ulysses_sp: bool
    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: Any

    _taps: ModelTaps | None = None
    _scorer: MicroBatchScorer | None = None
    _plan: _Forward | None = None
    _pad_size: int = 0
    _token_bytes: TokenBytes | None = None
    _eos_ids: set[int]

    def infer_batch(self, data: TensorDict, loss_function: Any = None) -> Any:
        """verl's `infer_batch`; with a request in `data`, importance comes along with the log-probs."""
        values = tu.pop(data, key=REQUEST, default=None)
        if values is None:
            return super().infer_batch(data, loss_function)  # type: ignore[misc]
        return self._infer_with_importance(data, Request.from_dict(values))

    # ---- the batch

    def _infer_with_importance(self, data: TensorDict, request: Request) -> dict[str, Any]:
        self._check_served()
        assert self._token_bytes is not None
        maybe_fix_3d_position_ids(data)
        segments, status_B = segment_batch(data, request, self._token_bytes, self._eos_ids)
        data[SEQUENCE_SEGMENTS] = sequence_segments(segments, data["input_ids"])

        order, num_ahead = self._scored_first(data, status_B)
        outputs = []
        if num_ahead:
            outputs.append(self._score(tu.index_select_tensor_dict(data, order[:num_ahead]), request))
        if num_ahead < len(order) and not request.importance_only:
            outputs.append(self._infer_plainly(tu.index_select_tensor_dict(data, order[num_ahead:])))

        result: dict[str, Any] = {"model_output": {}, "loss": [], "metrics": {}}
        inverse = torch.argsort(order)
        for output in outputs:
            result["loss"] += output["loss"]
        for key in ("log_probs", "entropy"):
            if all(key in output["model_output"] for output in outputs) and not request.importance_only:
                rows = [row for output in outputs for row in output["model_output"][key].unbind()]
                result["model_output"][key] = _nested([rows[i] for i in inverse.tolist()])
        result["model_output"].update(self._report(segments, status_B, order, outputs[:1] if num_ahead else []))
        return result

    def _scored_first(self, data: TensorDict, status_B: Tensor) -> tuple[Tensor, int]:
        """An order of the rows with those to score in front, and how many rows take the scoring pass.

        Every data-parallel rank must run the same number of micro-batches, so the ranks agree on the largest number of
        rows; a rank with fewer fills up with rows it does not score.
        """
        scored_B = status_B == Status.SCORED
        order = torch.cat([scored_B.nonzero()[:, 0], (~scored_B).nonzero()[:, 0]])
        count = scored_B.sum().to(get_device_id())
        distributed.all_reduce(count, op=distributed.ReduceOp.MAX, group=self._data_parallel_group())
        total, ahead = len(status_B), int(count.item())
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            step = self._scoring_micro_batch_size(data, total)
            ahead = math.ceil(ahead / step) * step
        return order, ahead

    def _scoring_micro_batch_size(self, data: TensorDict, total: int) -> int:
        """Rows a micro-batch when batches are not dynamic: never more than the actor update takes at once."""
        sizes = [data["micro_batch_size_per_gpu"], self.engine_config.micro_batch_size_per_gpu]
        return math.gcd(min(size for size in sizes if size), total)

    def _infer_plainly(self, data: TensorDict) -> Any:
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=math.gcd(data["micro_batch_size_per_gpu"], len(data)))
        return super().infer_batch(data, None)  # type: ignore[misc]

    def _report(
        self, segments: list[Tensor], status_B: Tensor, order: Tensor, outputs: list[dict[str, Any]]
    ) -> dict[str, Tensor]:
        importance = [torch.zeros(len(segment), dtype=torch.float32) for segment in segments]
        seconds = [0.0] * len(segments)
        for output in outputs:
            rows = output["model_output"]
            for place, (row, cost) in enumerate(zip(rows[IMPORTANCE].unbind(), rows[_SECONDS].unbind(), strict=True)):
                index = int(order[place])
                scores = row[len(row) - len(segments[index]) :].cpu()
                seconds[index] = float(cost)
                if torch.isfinite(scores).all():
                    importance[index] = scores
                else:
                    status_B[index] = Status.NON_FINITE
        report = torch.stack([status_B.float(), torch.tensor(seconds)], dim=1)
        return {IMPORTANCE: _nested(importance), SEGMENTS: _nested(segments), REPORT: _nested(list(report))}

    # ---- the scoring pass

    def _score(self, data: TensorDict, request: Request) -> Any:
        """Forward with a graph and backward to the embeddings, micro-batch by micro-batch."""
        dynamic = tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
        if dynamic:
            # Activations are kept for the backward: the actor update's budget, not the larger one of inference.
            budgets = [data["max_token_len_per_gpu"], self.engine_config.max_token_len_per_gpu]
            tu.assign_non_tensor(data, max_token_len_per_gpu=min(b for b in budgets if b))
        else:
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=self._scoring_micro_batch_size(data, len(data)))
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
            host_seconds = _elapsed(started)
        total_T: Tensor | None = None
        for draw in range(request.num_draws):
            rows_only = request.importance_only or request.importance == "oar_g" or draw > 0
            drawn = self._forward(micro_batch, _Forward(request, draw, rows_only))
            if not rows_only:
                output, host_seconds = drawn, _elapsed(started)
            assert self._scorer is not None
            assert self._taps.answer_logits is not None
            self._scorer.scalar(self._taps.answer_logits, draw).backward()
            scores_T = self._gathered_scores()
            total_T = scores_T if total_T is None else total_T + scores_T
        assert total_T is not None

        offsets = micro_batch["input_ids"].offsets().to(total_T.device)
        reasoning_T = micro_batch[SEQUENCE_SEGMENTS].values().to(total_T.device) == Segment.REASONING
        output["model_output"][IMPORTANCE] = torch.nested.nested_tensor_from_jagged(
            torch.where(reasoning_T, total_T / request.num_draws, 0.0), offsets
        )
        # The forward for log-probs would have been made anyway; the rest is what importance costs.
        seconds = _elapsed(started) - (0.0 if request.importance_only else host_seconds)
        output["model_output"][_SECONDS] = _nested([torch.tensor([seconds / len(micro_batch)])] * len(micro_batch))
        return output

    def _forward(self, micro_batch: TensorDict, plan: _Forward) -> dict[str, Any]:
        """One tapped forward through verl's own `forward_step`, which knows inputs, autocast and outputs."""
        self._plan = plan
        _, output = self.forward_step(micro_batch, loss_function=None, forward_only=True)  # type: ignore[attr-defined]
        return output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """verl's inputs; in a scoring pass, also where the answer's rows are on this rank."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self._taps is not None:
            assert self._plan is not None
            if self._scorer is None:
                self._scorer = self._new_scorer(micro_batch, inputs["input_ids"], self._plan.request)
                self._pad_size = arguments.get("pad_size", 0)
            draw = self._plan.draw
            noisy = self._plan.request.importance == "oar_g" and draw is not None
            noise = self._scorer.noise(draw) if noisy and draw is not None else None
            self._taps.prepare(self._scorer.local_row_N, noise, self._plan.rows_only)
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """verl's log-probs and entropy; nothing when only the answer's rows were projected."""
        if self._taps is not None and self._plan is not None and self._plan.rows_only:
            return {}
        return super().prepare_model_outputs(  # type: ignore[misc]
            output, output_args, micro_batch, logits_processor_func
        )

    def _new_scorer(self, micro_batch: TensorDict, local_input_ids: Tensor, request: Request) -> MicroBatchScorer:
        input_ids = micro_batch["input_ids"]
        offsets = input_ids.offsets()
        packed_T = torch.arange(input_ids.values().shape[0], device=input_ids.device)
        width = local_input_ids.shape[-1]
        if self.use_remove_padding:
            # Packed; under Ulysses each rank holds a slice of the pack, with the padding at the end of the last.
            rank = distributed.get_rank(self.ulysses_parallel_group) if self.use_ulysses_sp else 0
            local_T = packed_T - rank * width
            local_T = torch.where((local_T >= 0) & (local_T < width), local_T, -1)
        else:
            response_T = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
            local_T = response_T * width + packed_T - offsets[response_T]
        return MicroBatchScorer(
            request,
            micro_batch[SEQUENCE_SEGMENTS].values(),
            input_ids.values(),
            offsets,
            local_T,
            local_input_ids.numel(),
            self._sum_over_sequence_ranks,
        )

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

    def _data_parallel_group(self) -> Any:
        return self.get_data_parallel_group()  # type: ignore[attr-defined]

    def _check_served(self) -> None:
        """Once: refuse a model whose importance would be wrong (see `check_model`)."""
        if self._token_bytes is not None:
            return
        check_model(self.module)
        if self.use_ulysses_sp and hasattr(unwrapped(self.module).config, "vision_config"):
            raise UnsupportedModelError(
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size > 1 with a vision-language model: "
                "verl slices its inputs after the embeddings, where OAR cannot follow; allowed: 1"
            )
        self._token_bytes = TokenBytes(self.model_config.tokenizer)
        tokens = {self.model_config.tokenizer.eos_token_id}
        generation = getattr(self.model_config.generation_config, "eos_token_id", None)
        tokens.update(generation if isinstance(generation, list) else [generation])
        self._eos_ids = {token for token in tokens if token is not None}


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


def _nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _elapsed(since: float) -> float:
    get_torch_device().synchronize()
    return time.perf_counter() - since
