"""The part of an importance pass that verl's engines share: rows to score, micro-batches, failures, the fields of the result.

An engine's mixin adds the pass itself, `_score`. It acts only on a batch that carries a request; every other call goes to
verl's own code. With a request, the rows to score get a forward with a graph and a backward to the input embeddings. The other
rows get verl's own forward without a graph.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_torch_device, get_vendor
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine.base import EngineRegistry

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.hosts.verl.balancing import scored_first
from oar_plugin.hosts.verl.registration import subclass
from oar_plugin.hosts.verl.segments import SEQUENCE_SEGMENTS, segment_batch, sequence_segments
from oar_plugin.passes.gradient import Packed, Scores, importance_of_scores
from oar_plugin.passes.request import IMPORTANCE, REQUEST, SECONDS, SEGMENTS, STATUS, Request
from oar_plugin.passes.segments import end_of_sequence_tokens
from oar_plugin.passes.tokens import TokenBytes

logger = logging.getLogger(__name__)


def register_engines(mixin: type, host: type, *backends: str) -> None:
    """Replace verl's engine `host` for this machine's device in verl's registry.

    Our entry has device and vendor for a key, which verl looks up before a device alone. The registry's own method refuses to
    register a key twice, and a vendor's plugin may have registered this one.
    """
    key = os.getenv("VERL_ENGINE_DEVICE") or get_device_name(), os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    for backend in backends:
        try:
            held = EngineRegistry.get_engine_cls("language_model", backend)
        except ValueError:  # none for this device: a driver without a GPU imports the module, but builds no engine
            continue
        ours = subclass(mixin, held, host, f"engine '{backend}'")
        EngineRegistry._engines["language_model"][backend][key] = ours


class ImportancePass:
    """Importance for a verl engine. Put a subclass before the engine in the list of bases."""

    # Attributes of the host's engine.
    engine_config: Any
    model_config: Any

    _checked: frozenset[str] = frozenset()  # importances that `_check_supported` has passed with this model

    def _check_supported(self, request: Request) -> None:
        """Refuse a model, or an importance with this model or engine.

        UnsupportedModelError: names what is refused and what is allowed.
        """
        raise NotImplementedError

    def _score(self, data: TensorDict, request: Request) -> dict[str, Any]:
        """Forward with a graph and backward to the embeddings for every row of `data`.

        Returns:
            verl's output of an inference. Its `model_output` also has nested `IMPORTANCE` (float32, one value per token of
            `input_ids`) and `SECONDS`. It has no log-probs if the request is for importance only.
        """
        raise NotImplementedError

    def _copies_importance(
        self,
        data: TensorDict,
        request: Request,
        segments: Sequence[Tensor],
        status_B: Tensor,
        gradient: Sequence[Tensor],
    ) -> list[Tensor]:
        """Importance per row from masked copies, float32 `[L_i]`; zeros where `status_B` is not SCORED.

        An engine without it refuses such a request in `_check_supported`.

        Args:
            gradient: gradient scores `[L_i]`, which choose the units of a budget with `Copies.by_gradient`.
        """
        raise NotImplementedError

    def _reset_after_abort(self) -> Callable[[], object] | None:
        """A function that resets the engine after an aborted forward or backward; None if the engine has none."""
        return None

    def _sum_over_sharing_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the same rows; in place or not."""
        raise NotImplementedError

    def _micro_batches_divided_by(self) -> int:
        """The number of micro-batches in verl's engine is a multiple of this number."""
        return 1

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.model_config.tokenizer)

    @cached_property
    def _eos_ids(self) -> set[int]:
        return end_of_sequence_tokens(self.model_config.tokenizer, self.model_config.generation_config)

    def infer_batch(self, data: TensorDict, loss_function: Any = None) -> Any:
        """verl's `infer_batch`; with a request in `data`, the output also has importance."""
        values = tu.pop(data, key=REQUEST, default=None)
        if values is None:
            return super().infer_batch(data, loss_function)  # type: ignore[misc]
        return self._infer_with_importance(data, Request.from_dict(values))

    def _infer_with_importance(self, data: TensorDict, request: Request) -> dict[str, Any]:
        if request.importance not in self._checked:
            self._check_supported(request)
            self._checked |= {request.importance}
        maybe_fix_3d_position_ids(data)
        segments, status_B = segment_batch(data, request, self._token_bytes, self._eos_ids)
        self._agree_on_failures(segments, status_B)
        data[SEQUENCE_SEGMENTS] = sequence_segments(segments, data["input_ids"])

        importance = [torch.zeros(len(segment), dtype=torch.float32) for segment in segments]
        seconds = [0.0] * len(segments)
        order, num_ahead = torch.arange(len(status_B)), 0
        if request.importance_object.forwards(request.num_draws):
            order, num_ahead = self._scored_first(data, status_B)
        else:  # plain log-probs for every row
            importance = self._importance_without_a_forward(data, request, segments)
        outputs = []
        if num_ahead:
            scored = self._score_or_run_out_of_memory(tu.index_select_tensor_dict(data, order[:num_ahead]), request)
            if scored is None:
                status_B[status_B == Status.SCORED] = Status.OUT_OF_MEMORY
                order, num_ahead = torch.arange(len(status_B)), 0
            else:
                outputs = [scored]
                costs = zip(*(scored["model_output"][name].unbind() for name in (IMPORTANCE, SECONDS)), strict=True)
                for index, (row, cost) in zip(order[:num_ahead].tolist(), costs, strict=True):
                    importance[index] = row[len(row) - len(segments[index]) :].cpu()
                    seconds[index] = float(cost)
        if not request.importance_only:
            outputs += [
                self._infer_plainly(tu.index_select_tensor_dict(data, rows))
                for rows in self._plain_parts(data, order[num_ahead:])
            ]

        result: dict[str, Any] = {"model_output": {}, "loss": [], "metrics": {}}
        inverse = torch.argsort(order)
        for output in outputs:  # of a pipeline, only the last stage has log-probs and losses
            result["loss"] += output.get("loss", [])
        for key in ("log_probs", "entropy"):
            if all(key in output.get("model_output", {}) for output in outputs) and not request.importance_only:
                rows = [row for output in outputs for row in output["model_output"][key].unbind()]
                result["model_output"][key] = nested([rows[i] for i in inverse.tolist()])
        if request.importance_object.copies is not None:
            started = time.perf_counter()
            hold_back_non_finite(importance, status_B)
            importance = self._copies_importance(data, request, segments, status_B, importance)
            share = elapsed(started) / max(1, int((status_B == Status.SCORED).sum()))
            seconds = [s + share * (status_B[i].item() == Status.SCORED) for i, s in enumerate(seconds)]
        hold_back_non_finite(importance, status_B)
        report = {STATUS: nested(list(status_B[:, None])), SECONDS: nested(list(torch.tensor(seconds)[:, None]))}
        result["model_output"].update({IMPORTANCE: nested(importance), SEGMENTS: nested(segments), **report})
        return result

    def _agree_on_failures(self, segments: list[Tensor], status_B: Tensor) -> None:
        """Let a response whose search failed on one rank fall back on all ranks that hold it, in place.

        Otherwise their forwards would differ. A search may run out of time on one rank and just succeed on another.
        """
        failed_B = (status_B == Status.SEARCH_FAILED).to(get_device_id(), torch.int32)
        for row in self._sum_over_sharing_ranks(failed_B).nonzero()[:, 0].tolist():
            segments[row].fill_(int(Segment.OUTSIDE))
            status_B[row] = Status.SEARCH_FAILED

    def _scored_first(self, data: TensorDict, status_B: Tensor) -> tuple[Tensor, int]:
        """An order of the rows in which those to score come first, and the number of rows in the scoring pass.

        Every data-parallel rank must run equal numbers of micro-batches, so the pass has the maximum number of rows over ranks.
        A rank with fewer adds its shortest other rows. This holds for dynamic batches too: verl makes more micro-batches until
        those of every rank fit, and stops the run if a rank has fewer rows than micro-batches.
        """
        scored_B = status_B == Status.SCORED
        ahead, divisor = self.max_over_ranks(int(scored_B.sum())), self._micro_batches_divided_by()
        if self._is_dynamic(data):
            ahead = math.ceil(ahead / divisor) * divisor
        else:  # the smallest possible number of micro-batches, of equal size
            micro_batches = math.ceil(ahead / (divisor * self._most_scored_at_once(data))) * divisor
            ahead = math.ceil(ahead / max(1, micro_batches)) * micro_batches
        ahead = min(len(scored_B), ahead)
        return scored_first(scored_B, data["input_ids"].offsets().diff().cpu(), ahead), ahead

    def _score_or_run_out_of_memory(self, data: TensorDict, request: Request) -> dict[str, Any] | None:
        """The output of `_score`; None if memory ran out in the only process of an engine that can be reset.

        With several processes the others wait in a collective for the process that has left the pass, so running out of memory
        is an error. It is one in the update too, which needs more memory than the pass.
        """
        reset = self._reset_after_abort() if distributed.get_world_size() == 1 else None
        try:
            return self._score(data, request)
        except torch.OutOfMemoryError as error:
            fault = f"algorithm.oar.importance={request.importance}: no memory for a backward to the embeddings"
            if reset is None:
                allowed = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu"
                raise torch.OutOfMemoryError(f"{fault}: {allowed}, which bound its micro-batches ({error})") from error
            logger.warning("%s; the responses of this batch fall back to GRPO (%s)", fault, error)
        # Not in the handler: the exception holds the pass's tensors.
        reset()
        get_torch_device().empty_cache()
        return None

    def _is_dynamic(self, data: TensorDict) -> bool:
        """Whether micro-batches have a budget of tokens rather than of rows."""
        return bool(tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True))

    def _most_scored_at_once(self, data: TensorDict) -> int:
        """Maximum number of rows per micro-batch if batches are not dynamic: not more than in the actor update."""
        return min(
            size for size in (data["micro_batch_size_per_gpu"], self.engine_config.micro_batch_size_per_gpu) if size
        )

    def _limit_micro_batches(self, data: TensorDict) -> None:
        """Give the scoring pass the micro-batches of the actor update, because it keeps activations for a backward as well."""
        if self._is_dynamic(data):
            budgets = [data["max_token_len_per_gpu"], self.engine_config.max_token_len_per_gpu]
            tu.assign_non_tensor(data, max_token_len_per_gpu=min(b for b in budgets if b))
        else:
            rows, most = len(data) // self._micro_batches_divided_by(), self._most_scored_at_once(data)
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=largest_divisor(rows, most))

    def _plain_parts(self, data: TensorDict, rows: Tensor) -> list[Tensor]:
        """Rows that are not scored, in parts that verl can split. If micro-batches have a size: full ones, then the rest."""
        whole = len(rows)
        if not self._is_dynamic(data):
            whole -= whole % (data["micro_batch_size_per_gpu"] * self._micro_batches_divided_by())
        return [part for part in (rows[:whole], rows[whole:]) if len(part)]

    def _infer_plainly(self, data: TensorDict) -> Any:
        if not self._is_dynamic(data):
            rows = len(data) // self._micro_batches_divided_by()
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=largest_divisor(rows, data["micro_batch_size_per_gpu"]))
        return super().infer_batch(data, None)  # type: ignore[misc]

    def _importance_without_a_forward(self, data: TensorDict, request: Request, segments: list[Tensor]) -> list[Tensor]:
        """Importance that does not run the model; zeros for one that comes from copies alone."""
        input_ids = data["input_ids"]
        packed = Packed(input_ids.values(), data[SEQUENCE_SEGMENTS].values().to(input_ids.device), input_ids.offsets())
        nothing = Scores(request.importance_object, len(packed.token_T), input_ids.device)
        importance_T = importance_of_scores(request, packed, nothing)
        rows = importance_T.split(packed.offsets.diff().tolist())
        return [row[len(row) - len(segment) :].cpu() for row, segment in zip(rows, segments, strict=True)]

    def max_over_ranks(self, count: int) -> int:
        """The maximum of a count over the data-parallel ranks, which must run equal numbers of forwards."""
        counts = torch.tensor(count, device=get_device_id())
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX, group=group)
        return int(counts.item())


def score_fields(request: Request, packed: Packed, scores: Scores, seconds: float) -> dict[str, Tensor]:
    """The fields that `_score` adds to verl's output of some rows; `seconds`: actor seconds spent on all of them."""
    importance_T, rows = importance_of_scores(request, packed, scores), len(packed.offsets) - 1
    return {
        IMPORTANCE: torch.nested.nested_tensor_from_jagged(importance_T, packed.offsets),
        SECONDS: nested([torch.tensor([seconds / rows])] * rows),
    }


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n` that is at most `most`; 1 if there is none."""
    return next((size for size in range(min(n, most), 1, -1) if n % size == 0), 1)


def hold_back_non_finite(importance: list[Tensor], status_B: Tensor) -> None:
    """Replace non-finite importance of a response by zeros, and its status by NON_FINITE. In place."""
    for index, row in enumerate(importance):
        if not torch.isfinite(row).all():
            importance[index] = torch.zeros_like(row)
            status_B[index] = Status.NON_FINITE


def nested(rows: list[Tensor]) -> Tensor:
    """A field of the batch, made of its rows."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def elapsed(since: float) -> float:
    """Seconds since `time.perf_counter()` returned `since`, after the device has finished its work."""
    get_torch_device().synchronize()
    return time.perf_counter() - since
