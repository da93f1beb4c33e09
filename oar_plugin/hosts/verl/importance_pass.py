"""The part of the importance pass that all of verl's engines share: choice of rows, micro-batches, failures, result fields.

Each engine has a mixin, a subclass of `ImportancePass`, which changes `infer_batch` only for a batch with a request. Rows to
score then run in `_score`: forwards with a graph, and backwards to the input embeddings. Other rows run in verl's own forward.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed
from torch.nn.functional import pad
from verl.utils import device as host_device
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.workers.engine.base import EngineRegistry

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.estimator import weigh_rows
from oar_plugin.hosts.verl.balancing import largest_divisor, scored_first
from oar_plugin.hosts.verl.capabilities import subclass
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.output import logger
from oar_plugin.passes.gradient import Packed, Scores, importance_of_scores
from oar_plugin.passes.predicted_batch import PredictedBatch
from oar_plugin.passes.prediction import Predictor, predictor_of
from oar_plugin.passes.request import IMPORTANCE, NEEDED, REQUEST, SECONDS, STATUS, Request, nested
from oar_plugin.passes.segments import end_of_sequence_tokens, longest_of, segment_rows
from oar_plugin.passes.tokens import TokenBytes

ROW = "oar_row"  # int64 [B]: dynamic batching reorders the rows
SEQUENCE_SEGMENTS = "oar_sequence_segments"  # int64, one per token of prompt and response; OUTSIDE in rows not scored


def register_engines(mixin: type, host: type, *backends: str) -> None:
    """In verl's registry, replace the engine `host` for this machine's device by a subclass with `mixin`.

    The new entry's key is (device, vendor). verl looks this key up before the key of the device alone. The registry's own
    `register` refuses a key that exists, and a vendor's plugin may have registered this key, so the entry is set directly.
    verl 0.8 knows no vendors: its key is the device.
    """
    key: Any = get_device_name()
    if hasattr(host_device, "get_vendor"):
        key = os.getenv("VERL_ENGINE_DEVICE") or key, os.getenv("VERL_ENGINE_VENDOR") or host_device.get_vendor()
    for backend in backends:
        try:
            held = EngineRegistry.get_engine_cls("language_model", backend)
        except (ValueError, AssertionError):  # no engine for this device; a driver without a GPU, say, builds none
            continue
        ours = subclass(mixin, held, host, f"engine '{backend}'")
        EngineRegistry._engines["language_model"][backend][key] = ours


class ImportancePass:
    """Mixin that adds importance to a verl engine. Put its subclass before the engine in the list of bases."""

    engine_config: Any
    model_config: Any
    module: Any

    _predictor: Predictor | None = None  # of the run; a resumed run begins with a new one
    _predicted: PredictedBatch | None = None  # the batch, if its importance is predicted
    _checked: frozenset[str] = frozenset()  # names of importances that `_check_supported` has accepted
    _marks: list[Any]  # see `_switching`

    def _check_supported(self, data: TensorDict, request: Request) -> None:
        """Raises UnsupportedModelError if this engine cannot compute the importance with its model. `data`: the first batch."""
        raise NotImplementedError

    def _score(self, data: TensorDict, request: Request) -> dict[str, Any]:
        """Run forwards with a graph, and backwards to the embeddings, for every row of `data`.

        Returns the output of verl's `infer_batch`, without log-probs if `request.importance_only`. The `model_output` also has
        nested `IMPORTANCE` (float32, one value per token of `input_ids`).
        """
        raise NotImplementedError

    def _sum_over_sharing_ranks(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks that hold the same rows. It may overwrite its argument."""
        raise NotImplementedError

    def _micro_batch_multiple(self) -> int:
        """The number of micro-batches must be a multiple of this number."""
        return 1

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.model_config.tokenizer)

    def infer_batch(self, data: TensorDict, loss_function: Any = None) -> Any:
        """Run verl's `infer_batch`. If `data` has a request, the output also has importance."""
        values = tu.pop(data, key=REQUEST, default=None)
        if values is None:
            return super().infer_batch(data, loss_function)  # type: ignore[misc]
        request, self._marks = Request.from_dict(values), [mark()]
        tu.maybe_fix_3d_position_ids(data)
        if request.importance not in self._checked:
            self._check_supported(data, request)
            self._checked |= {request.importance}
        segments, status_B = self._segments(data, request)
        pairs = zip(segments, data["input_ids"].offsets().diff().tolist(), strict=True)
        whole = (pad(row.long(), (total - len(row), 0), value=Segment.OUTSIDE) for row, total in pairs)
        data[SEQUENCE_SEGMENTS] = nested(whole)

        # Rows to score come first. An importance without a forward of its own has no scoring pass.
        order, num_ahead = torch.arange(len(status_B)), 0
        outputs, importance = list[dict[str, Any]](), [torch.zeros(len(segment)) for segment in segments]
        kind, predicted = request.importance_object, self._predicted_batch(request, data, status_B)
        score_B = status_B == Status.SCORED if predicted is None else predicted.scored_B
        if request.forwards():
            order, num_ahead = self._scored_first(data, score_B)
        else:
            packed = packed_of(data)
            nothing = Scores(kind, len(packed.token_T), torch.device("cpu"))
            place(importance, order, self._field(request, packed, nothing, data, None))
        if num_ahead:
            asked = request if predicted is None else predicted.scoring
            output = self._score_or_run_out_of_memory(tu.index_select_tensor_dict(data, order[:num_ahead]), asked)
            if output is None:
                status_B[status_B == Status.SCORED] = Status.OUT_OF_MEMORY
                order, num_ahead = torch.arange(len(status_B)), 0
                if predicted is not None:
                    predicted.forget()
            else:
                outputs.append(output)
                place(importance, order[:num_ahead], output["model_output"][IMPORTANCE])
        if kind.copies and not (predicted and predicted.scoring.predicts):
            scored_B = score_B & (status_B == Status.SCORED)
            importance = self._copies_importance(data, request, segments, scored_B)  # type: ignore[attr-defined]
        if predicted is not None:  # computed scores, those of copies too, are labels; the gate gets predictions
            importance = predicted.learn(order, importance)
        if num_ahead < len(order) and not (request.importance_only and predicted is None):
            rest = order[num_ahead:]
            outputs.append(self._infer_unscored(data, rest, None if predicted is None else predicted.predicting))
            if predicted is not None:
                place(importance, rest, outputs[-1]["model_output"][IMPORTANCE])

        # With pipeline parallelism, only the last stage has log-probs and losses.
        losses = [loss for output in outputs for loss in output.get("loss", [])]
        result: dict[str, Any] = {"model_output": {}, "loss": losses, "metrics": {}}
        inverse = torch.argsort(order)
        for key in ("log_probs", "entropy", "routed_experts"):  # the last one with router replay
            if all(key in output.get("model_output", {}) for output in outputs) and not request.importance_only:
                rows = [row for output in outputs for row in output["model_output"][key].unbind()]
                result["model_output"][key] = nested([rows[i] for i in inverse.tolist()])
        for index, row in enumerate(importance):
            if not torch.isfinite(row).all():
                importance[index], status_B[index] = torch.zeros_like(row), Status.NON_FINITE
        prediction_3 = None if predicted is None else predicted.end_step()
        answer = weigh_rows(importance, segments, status_B, request.config, kind, prediction_3)
        answer[SECONDS] = [torch.tensor([self._seconds() / len(segments)])] * len(segments)
        result["model_output"] |= {name: nested(rows) for name, rows in answer.items()}
        return result

    @contextmanager
    def _switching(self, switches: bool = True) -> Iterator[None]:
        """Inside, time counts as verl's if it was importance's, and the other way round. `switches`: False does nothing."""
        self._marks += [mark()] * switches
        try:
            yield
        finally:
            self._marks += [mark()] * switches

    def _seconds(self) -> float:
        """Seconds of the pass so far without verl's own. It waits for the device."""
        marks = [*self._marks, mark()]
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if get_device_name() == "cpu":
            return sum(end - begin for begin, end in pairs)
        marks[-1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000

    def _predicted_batch(self, request: Request, data: TensorDict, status_B: Tensor) -> PredictedBatch | None:
        """Returns the batch with the run's predictor; None if importance is computed for all rows."""
        self._predictor, self._predicted = self._predictor or predictor_of(request.config), None
        if self._predictor is not None:
            given = None
            if request.config.offloads:
                status = data[ENGINE_FIELDS[STATUS]].cpu()  # behind the gate
                engine_B = (status.values() if status.is_nested else status).flatten()
                scored_B = (engine_B == Status.SCORED) | (engine_B == Status.CONSTANT)
                given = response_rows(data, ENGINE_FIELDS[IMPORTANCE]), scored_B
            usable_B, device = status_B == Status.SCORED, torch.device(get_device_id())
            of_batch = packed_of(data), usable_B, self._sum_over_data, device
            self._predicted = PredictedBatch(self._predictor, request, *of_batch, given)
        return self._predicted

    def _field(
        self, request: Request, packed: Packed, scores: Scores, data: TensorDict, log_prob_T: Tensor | None
    ) -> Tensor:
        """The field `IMPORTANCE` of `_score`: one value per token of a sequence. `scores` are the sums over ranks.

        `data` has the rows of `packed`; `log_prob_T` their log-probs as verl has them, at the token before.
        """
        if self._predicted is None or log_prob_T is None:
            importance_T = importance_of_scores(request, packed, scores)
        else:
            importance_T = self._predicted.field(packed, scores, log_prob_T.roll(1), data[ROW].tolist())
        return torch.nested.nested_tensor_from_jagged(importance_T, packed.offsets)

    def _segments(self, data: TensorDict, request: Request) -> tuple[list[Tensor], Tensor]:
        """`segment_rows` of a batch; a response whose answer search failed on one rank that holds it has failed on all of them.

        A search may time out on one rank and succeed on another. These ranks would then run different rows.
        """
        columns = response_rows(data, "responses"), response_rows(data, "response_mask"), data[NEEDED].cpu().unbind()
        rows = zip(*columns, data["input_ids"].offsets().diff().tolist(), strict=True)
        responses = ((x.tolist(), own.numpy().astype(bool), bool(n.any()), total - len(x)) for x, own, n, total in rows)
        # Without `rollout.max_model_len`, verl's engines take the model's positions. SGLang leaves the last one free.
        request = replace(request, max_length=min(request.max_length, longest_of(self.model_config.hf_config) - 1))
        eos_ids = end_of_sequence_tokens(self.model_config.tokenizer, self.model_config.generation_config)
        segments, status_B = segment_rows(responses, request, self._token_bytes, eos_ids)
        failed_B = (status_B == Status.SEARCH_FAILED).to(get_device_id(), torch.int32)
        for row in self._sum_over_sharing_ranks(failed_B).nonzero()[:, 0].tolist():
            segments[row].fill_(int(Segment.OUTSIDE))
            status_B[row] = Status.SEARCH_FAILED
        return segments, status_B

    def _scored_first(self, data: TensorDict, scored_B: Tensor) -> tuple[Tensor, int]:
        """Returns (indices of all rows, sorted so that rows to score are first; number of rows in the scoring pass).

        Data-parallel ranks must run equal numbers of micro-batches. So each rank's scoring pass has the same number of
        rows: the maximum over ranks of the number of rows to score, rounded up to equal micro-batches. A rank with
        fewer rows to score adds its shortest other rows. Dynamic batches need this too: verl uses the maximum number of
        micro-batches on all ranks, and stops the run if a rank has fewer rows than micro-batches.
        """
        ahead, divisor = self.max_over_ranks(int(scored_B.sum())), self._micro_batch_multiple()
        if self._is_dynamic(data):
            ahead = math.ceil(ahead / divisor) * divisor
        else:  # as few micro-batches as possible, all of one size
            micro_batches = math.ceil(ahead / (divisor * self._most_at_once(data)[1])) * divisor
            ahead = math.ceil(ahead / max(1, micro_batches)) * micro_batches
        ahead = min(len(scored_B), ahead)
        return scored_first(scored_B, data["input_ids"].offsets().diff().cpu(), ahead), ahead

    def _score_or_run_out_of_memory(self, data: TensorDict, request: Request) -> dict[str, Any] | None:
        """Returns the output of `_score`; None if memory ran out in a single-process run whose engine can be reset.

        Else OutOfMemoryError: of several processes, the others would wait in a collective for the one that left the pass.
        """
        self._limit_micro_batches(data)
        # FSDP2 has this method since torch 2.13; FSDP1 does not, and Megatron does not.
        reset = getattr(self.module, "reset_iter_state", None) if distributed.get_world_size() == 1 else None
        try:
            return self._score(data, request)
        except torch.OutOfMemoryError as error:
            fault = f"algorithm.oar.importance={request.importance}: out of memory in the scoring pass"
            if reset is None:
                allowed = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu"
                raise torch.OutOfMemoryError(f"{fault}: {allowed}, which limit its micro-batches ({error})") from error
            logger.warning("%s; the responses of this batch fall back to GRPO (%s)", fault, error)
        # Reset after the `except` block: inside it, the exception holds the pass's tensors, and their memory.
        reset()
        get_torch_device().empty_cache()
        return None

    def _is_dynamic(self, data: TensorDict) -> bool:
        """Whether the size of micro-batches is limited in tokens rather than in rows."""
        return bool(tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True))

    def _most_at_once(self, data: TensorDict) -> tuple[str, int]:
        """Name and value of the limit of micro-batches: the smaller one of log-prob pass and actor update."""
        name = "max_token_len_per_gpu" if self._is_dynamic(data) else "micro_batch_size_per_gpu"
        return name, min(most for most in (data[name], getattr(self.engine_config, name)) if most)

    def _limit_micro_batches(self, data: TensorDict) -> None:
        name, most = self._most_at_once(data)
        if not self._is_dynamic(data):  # verl needs whole micro-batches
            most = largest_divisor(len(data) // self._micro_batch_multiple(), most)
        tu.assign_non_tensor(data, **{name: most})

    def _infer_unscored(self, data: TensorDict, rows: Tensor, request: Request | None) -> dict[str, Any]:
        """verl's own pass over the other rows, filled up to whole micro-batches. With a request it also predicts importance."""
        if not self._is_dynamic(data):
            shortest = rows[data["input_ids"].offsets().diff().cpu()[rows].argmin()]
            fill = -len(rows) % (data["micro_batch_size_per_gpu"] * self._micro_batch_multiple())
            rows = torch.cat([rows, shortest.expand(fill)])
        part = tu.index_select_tensor_dict(data, rows)
        if request is not None:
            return self._score(part, request)
        with self._switching():
            return super().infer_batch(part, None)  # type: ignore[misc]

    def _sum_over_data(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the data-parallel ranks. It may overwrite its argument."""
        distributed.all_reduce(tensor, group=self.get_data_parallel_group())  # type: ignore[attr-defined]
        return tensor

    def max_over_ranks(self, count: int) -> int:
        """Returns the maximum of a count over the data-parallel ranks."""
        counts = torch.tensor(count, device=get_device_id())
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX, group=group)
        return int(counts.item())


def response_rows(data: TensorDict, name: str) -> list[Tensor]:
    """Returns a field's row of each response, on the CPU, without the padding on the right of `RayPPOTrainer`'s batches."""
    field = data[name].cpu()
    if field.is_nested:
        return list(field.unbind())
    length_B = data["attention_mask"][:, -field.shape[1] :].sum(-1)
    return [row[:length] for row, length in zip(field.unbind(), length_B.tolist(), strict=True)]


def packed_of(data: TensorDict) -> Packed:
    """Returns the sequences of a batch and their segments, on the CPU, where verl's batches are until `forward_step`."""
    input_ids, segments = data["input_ids"], data[SEQUENCE_SEGMENTS]
    return Packed(*(tensor.cpu() for tensor in (input_ids.values(), segments.values(), input_ids.offsets())))


def place(importance: list[Tensor], rows: Tensor, field: Tensor) -> None:
    """Puts the responses' part of `IMPORTANCE` of some rows where it belongs. Rows that fill up a micro-batch come last."""
    for row, found_T in zip(rows.tolist(), field.unbind(), strict=False):
        importance[row] = found_T[len(found_T) - len(importance[row]) :]


def mark() -> Any:
    """A moment of the device's stream: an event that the CPU does not wait for; on a CPU, seconds."""
    if get_device_name() == "cpu":
        return time.perf_counter()
    event = get_torch_device().Event(enable_timing=True)
    event.record()
    return event
