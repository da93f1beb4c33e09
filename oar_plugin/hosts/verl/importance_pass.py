"""What verl's engines share in an importance pass: which rows are scored, in step with whom, and the fields of the result.

An engine's mixin supplies the pass itself, `_score`. It acts only on a batch that carries a request; every other call goes
to verl's own code untouched. With one, the rows that are to be scored come first and get a forward with a graph and a
backward to the input embeddings; the other rows get verl's plain no-gradient forward.
"""

import logging
import math
import os
import time
from collections.abc import Callable
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
from oar_plugin.hosts.verl.engine_copies import engine_copies
from oar_plugin.hosts.verl.segments import SEQUENCE_SEGMENTS, segment_batch, sequence_segments
from oar_plugin.passes.gradient import Packed, Scores, importance_of_scores
from oar_plugin.passes.request import IMPORTANCE, REQUEST, SECONDS, SEGMENTS, STATUS, Request
from oar_plugin.passes.segments import end_of_sequence_tokens
from oar_plugin.passes.tokens import TokenBytes

logger = logging.getLogger(__name__)


def register_engine(mixin: type, *backends: str) -> None:
    """Register a subclass of the engine that verl's registry holds for this machine. As its vendor's entry it wins over the
    device's, which is the host's own."""
    for backend in backends:
        try:
            held = EngineRegistry.get_engine_cls("language_model", backend)
        except ValueError:  # none for this device: a driver without a GPU imports the module, but builds no engine
            continue
        # What verl looks for first. It refuses to register a key twice, which a vendor's own plugin may have done.
        key = os.getenv("VERL_ENGINE_DEVICE") or get_device_name(), os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
        engine = type(f"Oar{held.__name__}", (mixin, held), {"__module__": mixin.__module__})
        EngineRegistry._engines["language_model"][backend][key] = engine


class ImportancePass:
    """The batch's side of importance for a verl engine. Put a subclass before the engine in the list of bases."""

    # What the host's engine provides.
    engine_config: Any
    model_config: Any

    token_bytes: TokenBytes | None = None
    _eos_ids: set[int]

    def _score(self, data: TensorDict, request: Request) -> dict[str, Any]:
        """Forward with a graph and backward to the embeddings of every row of `data`.

        Returns:
            verl's output of an inference. Its `model_output` also holds nested `IMPORTANCE` (float32, one value a token of
            `input_ids`) and `SECONDS` (`[1]` a row); it holds no log-probs when only importance was asked for.
        """
        raise NotImplementedError

    def _check_served(self, request: Request) -> None:
        """Refuse a request, and while `token_bytes` is None a model, whose importance would be wrong."""
        raise NotImplementedError

    def _sum_over_sharing_ranks(self, tensor: Tensor) -> Tensor:
        """Over the ranks that hold the same rows; in place or not."""
        raise NotImplementedError

    def _micro_batches_divided_by(self) -> int:
        """verl's engine runs micro-batches in multiples of this number."""
        return 1

    def infer_batch(self, data: TensorDict, loss_function: Any = None) -> Any:
        """verl's `infer_batch`; with a request in `data`, importance comes along with the log-probs."""
        values = tu.pop(data, key=REQUEST, default=None)
        if values is None:
            return super().infer_batch(data, loss_function)  # type: ignore[misc]
        return self._infer_with_importance(data, Request.from_dict(values))

    def _infer_with_importance(self, data: TensorDict, request: Request) -> dict[str, Any]:
        self._check_served(request)
        if self.token_bytes is None:
            self.token_bytes = TokenBytes(self.model_config.tokenizer)
            self._eos_ids = end_of_sequence_tokens(self.model_config.tokenizer, self.model_config.generation_config)
        maybe_fix_3d_position_ids(data)
        segments, status_B = segment_batch(data, request, self.token_bytes, self._eos_ids)
        self._agree_on_failures(segments, status_B)
        data[SEQUENCE_SEGMENTS] = sequence_segments(segments, data["input_ids"])

        order, num_ahead = torch.arange(len(status_B)), 0
        looks_at_the_model = bool(request.importance_object.forwards(request.num_draws))
        if looks_at_the_model:  # else plain log-probs for every row
            order, num_ahead = self._scored_first(data, status_B)
        outputs = []
        if num_ahead:
            scored = self._score_or_run_out_of_memory(tu.index_select_tensor_dict(data, order[:num_ahead]), request)
            if scored is not None:
                outputs = [scored]
            else:
                status_B[status_B == Status.SCORED] = Status.OUT_OF_MEMORY
                order, num_ahead = torch.arange(len(status_B)), 0
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
        if looks_at_the_model:
            importance, seconds = self._gradient_importance(segments, order, outputs[:1] if num_ahead else [])
        else:
            importance, seconds = self._importance_without_a_forward(data, request, segments), [0.0] * len(segments)
        if request.importance_object.copies is not None:
            started = time.perf_counter()
            hold_back_non_finite(importance, status_B)
            importance = engine_copies(self, data, request, segments, status_B, importance)
            share = elapsed(started) / max(1, int((status_B == Status.SCORED).sum()))
            seconds = [s + share * (status_B[i].item() == Status.SCORED) for i, s in enumerate(seconds)]
        hold_back_non_finite(importance, status_B)
        report = {STATUS: nested(list(status_B[:, None])), SECONDS: nested(list(torch.tensor(seconds)[:, None]))}
        result["model_output"].update({IMPORTANCE: nested(importance), SEGMENTS: nested(segments), **report})
        return result

    def _agree_on_failures(self, segments: list[Tensor], status_B: Tensor) -> None:
        """A response whose search failed on one of the ranks that hold it falls back on all of them, in place: else their
        forwards would differ. One may be out of time where another was a little faster."""
        failed_B = (status_B == Status.SEARCH_FAILED).to(get_device_id(), torch.int32)
        for row in self._sum_over_sharing_ranks(failed_B).nonzero()[:, 0].tolist():
            segments[row].fill_(int(Segment.OUTSIDE))
            status_B[row] = Status.SEARCH_FAILED

    def _scored_first(self, data: TensorDict, status_B: Tensor) -> tuple[Tensor, int]:
        """An order of the rows with those to score in front, and how many rows take the scoring pass.

        Every data-parallel rank must run the same number of micro-batches, so the ranks agree on the largest number of
        rows; a rank with fewer fills up with rows it does not score, the shortest. So does one with dynamic batches: verl makes
        more micro-batches until every rank's fit, and stops the run where a rank has fewer rows than that.
        """
        scored_B = status_B == Status.SCORED
        ahead, divisor = self.largest_count(int(scored_B.sum())), self._micro_batches_divided_by()
        if self._is_dynamic(data):
            ahead = math.ceil(ahead / divisor) * divisor
        else:  # as few micro-batches as full ones would be, of equal size
            micro_batches = math.ceil(ahead / (divisor * self._most_scored_at_once(data))) * divisor
            ahead = math.ceil(ahead / max(1, micro_batches)) * micro_batches
        ahead = min(len(scored_B), ahead)
        return scored_first(scored_B, data["input_ids"].offsets().diff().cpu(), ahead), ahead

    def _score_or_run_out_of_memory(self, data: TensorDict, request: Request) -> dict[str, Any] | None:
        """What `_score` returns; None where memory ran out, no other process waits for this one, and the engine has a way back.

        Of several processes the others wait in a collective for the one that has left the pass. There it is an error, as it is
        where the update runs out of memory, which needs more than the pass does.
        """
        way_back = self._way_back() if distributed.get_world_size() == 1 else None
        try:
            return self._score(data, request)
        except torch.OutOfMemoryError as error:
            told = f"algorithm.oar.importance={request.importance}: no memory for a backward to the embeddings"
            if way_back is None:
                allowed = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu"
                raise torch.OutOfMemoryError(f"{told}: {allowed}, which bound its micro-batches ({error})") from error
            logger.warning("%s; the responses of this batch stay plain GRPO (%s)", told, error)
        # Not in the handler: the exception holds the pass's tensors.
        way_back()
        get_torch_device().empty_cache()
        return None

    def _way_back(self) -> Callable[[], object] | None:
        """What makes the engine whole behind a forward or backward that was left half-way; None where it has no such thing."""
        return None

    def _is_dynamic(self, data: TensorDict) -> bool:
        """Whether micro-batches are made by their tokens, not by their rows."""
        return bool(tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True))

    def _most_scored_at_once(self, data: TensorDict) -> int:
        """Rows a micro-batch when batches are not dynamic: no more than the actor update takes at once."""
        return min(
            size for size in (data["micro_batch_size_per_gpu"], self.engine_config.micro_batch_size_per_gpu) if size
        )

    def _limit_micro_batches(self, data: TensorDict) -> None:
        """Give the scoring pass the micro-batches of the actor update: its activations are kept for the backward too."""
        if self._is_dynamic(data):
            budgets = [data["max_token_len_per_gpu"], self.engine_config.max_token_len_per_gpu]
            tu.assign_non_tensor(data, max_token_len_per_gpu=min(b for b in budgets if b))
        else:
            rows, most = len(data) // self._micro_batches_divided_by(), self._most_scored_at_once(data)
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=largest_divisor(rows, most))

    def _plain_parts(self, data: TensorDict, rows: Tensor) -> list[Tensor]:
        """Rows that are not scored, in parts that verl can split: where micro-batches have a size, full ones and the rest."""
        whole = len(rows)
        if not self._is_dynamic(data):
            whole -= whole % (data["micro_batch_size_per_gpu"] * self._micro_batches_divided_by())
        return [part for part in (rows[:whole], rows[whole:]) if len(part)]

    def _infer_plainly(self, data: TensorDict) -> Any:
        if not self._is_dynamic(data):
            rows = len(data) // self._micro_batches_divided_by()
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=largest_divisor(rows, data["micro_batch_size_per_gpu"]))
        return super().infer_batch(data, None)  # type: ignore[misc]

    def _gradient_importance(
        self, segments: list[Tensor], order: Tensor, outputs: list[dict[str, Any]]
    ) -> tuple[list[Tensor], list[float]]:
        """Importance of each response and the seconds it took; zeros for the rows that were not scored."""
        importance = [torch.zeros(len(segment), dtype=torch.float32) for segment in segments]
        seconds = [0.0] * len(segments)
        for output in outputs:
            rows = output["model_output"]
            for place, (row, cost) in enumerate(zip(rows[IMPORTANCE].unbind(), rows[SECONDS].unbind(), strict=True)):
                index = int(order[place])
                importance[index] = row[len(row) - len(segments[index]) :].cpu()
                seconds[index] = float(cost)
        return importance, seconds

    def _importance_without_a_forward(self, data: TensorDict, request: Request, segments: list[Tensor]) -> list[Tensor]:
        """Importance that looks at no model; zeros for one that comes from copies alone."""
        input_ids = data["input_ids"]
        packed = Packed(input_ids.values(), data[SEQUENCE_SEGMENTS].values().to(input_ids.device), input_ids.offsets())
        nothing = Scores(request.importance_object, len(packed.token_T), input_ids.device)
        importance_T = importance_of_scores(request, packed, nothing)
        rows = importance_T.split(packed.offsets.diff().tolist())
        return [row[len(row) - len(segment) :].cpu() for row, segment in zip(rows, segments, strict=True)]

    def largest_count(self, count: int) -> int:
        """The largest of the data-parallel ranks' counts: all of them must make the same number of forwards."""
        counts = torch.tensor(count, device=get_device_id())
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX, group=group)
        return int(counts.item())


def score_fields(request: Request, packed: Packed, scores: Scores, seconds: float) -> dict[str, Tensor]:
    """What `_score` adds to verl's output of some rows, on which the actor has spent so many seconds."""
    importance_T, rows = importance_of_scores(request, packed, scores), len(packed.offsets) - 1
    return {
        IMPORTANCE: torch.nested.nested_tensor_from_jagged(importance_T, packed.offsets),
        SECONDS: nested([torch.tensor([seconds / rows])] * rows),
    }


def largest_divisor(number: int, most: int) -> int:
    """Of a number, not above another one."""
    return next((size for size in range(min(number, most), 1, -1) if number % size == 0), 1)


def hold_back_non_finite(importance: list[Tensor], status_B: Tensor) -> None:
    """Zeros, and the status that says why, for responses whose scores are not numbers. In place."""
    for index, row in enumerate(importance):
        if not torch.isfinite(row).all():
            importance[index] = torch.zeros_like(row)
            status_B[index] = Status.NON_FINITE


def nested(rows: list[Tensor]) -> Tensor:
    """A field of the batch from its rows."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def elapsed(since: float) -> float:
    """Seconds since `time.perf_counter()` said `since`, the device's work included."""
    get_torch_device().synchronize()
    return time.perf_counter() - since
