"""What all of verl's engines share: one step of the schedule for a batch with a request.

Each engine has a mixin, a subclass of `ImportancePass`, which changes `infer_batch` only for a batch with a request. verl's own
forward runs over all rows and gives log-probs; hooks read from it. Copies and rows with a backward run afterwards.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
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
from oar_plugin.hosts.verl.balancing import filled_up
from oar_plugin.hosts.verl.capabilities import subclass
from oar_plugin.hosts.verl.offload import ENGINE_FIELDS
from oar_plugin.output import logger
from oar_plugin.passes.gradient import Packed
from oar_plugin.passes.host import Work
from oar_plugin.passes.request import CHOSEN, IMPORTANCE, NEEDED, REQUEST, SECONDS, STATUS, Request, nested
from oar_plugin.passes.schedule import Given, Schedule
from oar_plugin.passes.segments import end_of_sequence_tokens, longest_of, segment_rows
from oar_plugin.passes.tokens import TokenBytes

ROW = "oar_row"  # int64 [B]: dynamic batching reorders the rows


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

    _schedule: Schedule | None = None  # of the run; a resumed run begins with a new one
    _checked: frozenset[str] = frozenset()  # names of importances that `_check_supported` has accepted

    # What each engine defines. It raises UnsupportedModelError for the first batch; runs verl's `infer_batch`, from which hooks
    # read; runs forwards whose log-probs nobody wants, and their backwards, of rows with the numbers `ROW`; returns the sum
    # over the ranks that hold the same rows, which may overwrite its argument.
    _check_supported: Callable[[TensorDict, Request], None]
    _read: Callable[[TensorDict, Work], dict[str, Any]]
    _run: Callable[[TensorDict, Work], None]
    _sum_over_sharing_ranks: Callable[[Tensor], Tensor]

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
        request = Request.from_dict(values)
        tu.maybe_fix_3d_position_ids(data)
        if request.importance not in self._checked:
            self._check_supported(data, request)
            self._checked |= {request.importance}
        segments, status_B = self._segments(data, request)
        self._schedule = self._schedule or Schedule(request.config)
        packed, batch = packed_of(data, segments), EngineBatch(self, data, request)
        chosen_B = response_column(data, NEEDED) == CHOSEN
        result = self._schedule.run(batch, request, packed, status_B, chosen_B, self._given(data, request, packed))
        parts = result.importance_T.split(packed.offsets.diff().tolist())
        importance = [part[len(part) - len(segment) :] for part, segment in zip(parts, segments, strict=True)]
        how = segments, result.status_B, request.config, request.importance_object, self._schedule.prediction_3
        fields = weigh_rows(importance, *how)
        fields[IMPORTANCE] = [row.nan_to_num(0.0, 0.0, 0.0) for row in fields[IMPORTANCE]]
        fields[SECONDS] = [torch.tensor([batch.seconds / len(segments)])] * len(segments)
        output = batch.output or {"model_output": {}, "loss": [], "metrics": {}}
        output.setdefault("model_output", {}).update({name: nested(rows) for name, rows in fields.items()})
        return output

    def _infer(self, data: TensorDict) -> dict[str, Any]:
        output: dict[str, Any] = super().infer_batch(data, None)  # type: ignore[misc]
        return output

    def _given(self, data: TensorDict, request: Request, packed: Packed) -> Given | None:
        """The engines' scores, if importance is predicted from these."""
        if not (request.config.offloads and request.config.amortize.share is not None):
            return None
        engine_B = response_column(data, ENGINE_FIELDS[STATUS])  # behind the gate
        scored_B = (engine_B == Status.SCORED) | (engine_B == Status.CONSTANT)
        rows = zip(response_rows(data, ENGINE_FIELDS[IMPORTANCE]), packed.offsets.diff().tolist(), strict=True)
        return Given(torch.cat([pad(row, (total - len(row), 0)) for row, total in rows]), scored_B)

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

    def _run_or_run_out_of_memory(self, data: TensorDict, work: Work, request: Request) -> bool:
        """Returns whether memory sufficed; False only in a single-process run whose engine can be reset.

        Else OutOfMemoryError: of several processes, the others would wait in a collective for the one that left the pass.
        """
        # FSDP2 has this method since torch 2.13; FSDP1 does not, and Megatron does not.
        reset = getattr(self.module, "reset_iter_state", None) if distributed.get_world_size() == 1 else None
        try:
            self._run(data, work)
            return True
        except torch.OutOfMemoryError as error:
            fault = f"algorithm.oar.importance={request.importance}: out of memory in the importance pass"
            if reset is None:
                allowed = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu"
                raise torch.OutOfMemoryError(f"{fault}: {allowed}, which limit its micro-batches ({error})") from error
            logger.warning("%s; the responses of this batch fall back to GRPO (%s)", fault, error)
        # Reset after the `except` block: inside it, the exception holds the pass's tensors, and their memory.
        reset()
        get_torch_device().empty_cache()
        return False

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
            number = len(data) // self._micro_batch_multiple()
            most = next(size for size in range(min(number, most), 0, -1) if number % size == 0)
        tu.assign_non_tensor(data, **{name: most})

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


def response_column(data: TensorDict, name: str) -> Tensor:
    """Returns a field's one value of each response, on the CPU."""
    field = data[name].cpu()
    return (field.values() if field.is_nested else field).flatten()


def packed_of(data: TensorDict, segments: Sequence[Tensor]) -> Packed:
    """The sequences of a batch and the segments of its responses, on the CPU, where batches are until `forward_step`."""
    input_ids = data["input_ids"]
    token_T, offsets = input_ids.values().cpu(), input_ids.offsets().cpu()
    pairs = zip(segments, offsets.diff().tolist(), strict=True)
    whole = [pad(row.long(), (total - len(row), 0), value=int(Segment.OUTSIDE)) for row, total in pairs]
    return Packed(token_T, torch.cat(whole), offsets)


class EngineBatch:
    """One batch of an engine: the `Host` of a step. `output`: of verl's `infer_batch`; None: not wanted."""

    def __init__(self, engine: Any, data: TensorDict, request: Request) -> None:
        self.engine, self.data, self.request = engine, data, request
        self.device, self.gives_log_probs = torch.device(get_device_id()), not request.importance_only
        self.output: dict[str, Any] | None = None
        self.share, self.total = engine._sum_over_sharing_ranks, engine._sum_over_data
        self.largest = engine.max_over_ranks
        self.seconds = 0.0  # of copies and backwards

    def read(self, rows: Sequence[int], work: Work | None) -> bool:
        if self.gives_log_probs:
            self.data[ROW] = torch.arange(len(self.data))
            self.output = self.engine._infer(self.data) if work is None else self.engine._read(self.data, work)
            return True
        return work is None or self._run(rows, work)

    def gradient(self, rows: Sequence[int], work: Work) -> bool:
        return self._run(rows, work)

    def copies(self, copies: Packed, like: Sequence[int], work: Work) -> None:
        begun = time.perf_counter()
        data = like_rows(self.data, like, copies.token_T.split(copies.offsets.diff().tolist()))
        data[ROW] = torch.arange(len(like))
        self.engine._run(data, work)
        self._count(begun)

    def whole(self, count: int) -> int:
        """Dynamic micro-batches are as many as the largest rank needs, and no more than there are rows."""
        size = self.engine._micro_batch_multiple()
        if not self.engine._is_dynamic(self.data):
            size *= self.data["micro_batch_size_per_gpu"]
        return math.ceil(count / size) * size

    def _run(self, rows: Sequence[int], work: Work) -> bool:
        """Runs these rows, and shortest others where other ranks have more of them. Returns whether memory sufficed."""
        begun, engine, data = time.perf_counter(), self.engine, self.data
        ahead, divisor = self.largest(len(rows)), engine._micro_batch_multiple()
        if not ahead:
            return True
        if engine._is_dynamic(data):  # verl stops the run if a rank has fewer rows than the largest has micro-batches
            ahead = math.ceil(ahead / divisor) * divisor
        else:  # as few micro-batches as possible, all of one size
            micro_batches = math.ceil(ahead / (divisor * engine._most_at_once(data)[1])) * divisor
            ahead = math.ceil(ahead / micro_batches) * micro_batches
        numbers = filled_up(rows, data["input_ids"].offsets().diff().cpu(), min(len(data), ahead))
        part = tu.index_select_tensor_dict(data, numbers)
        part[ROW] = numbers
        engine._limit_micro_batches(part)
        done = engine._run_or_run_out_of_memory(part, work, self.request)
        self._count(begun)
        return bool(done)

    def _count(self, begun: float) -> None:
        if get_device_name() != "cpu":
            get_torch_device().synchronize()
        self.seconds += time.perf_counter() - begun


def nested_positions(rows: Sequence[Tensor]) -> Tensor:
    """Positions `[L_i]`, with images `[4, L_i]`: of equal rows torch would take the first dimension for the ragged one."""
    if rows[0].ndim == 1:
        return nested(rows)
    offsets = pad(torch.tensor([row.shape[-1] for row in rows]).cumsum(0), (1, 0)).to(rows[0].device)
    values = torch.cat(list(rows), -1)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)


def like_rows(data: TensorDict, rows: Sequence[int], sequences: Sequence[Tensor]) -> TensorDict:
    """A batch of other sequences, each no longer than the row whose images, positions and other fields it gets."""
    made = tu.index_select_tensor_dict(data.exclude("routed_experts"), torch.tensor(rows))
    positions = zip(made["position_ids"].unbind(), sequences, strict=True)
    made["position_ids"] = nested_positions([row[..., : len(one)].contiguous() for row, one in positions])
    made["input_ids"] = nested(sequences)
    made["loss_mask"] = nested([torch.ones_like(one) for one in sequences])
    tu.assign_non_tensor(made, calculate_entropy=False, enable_routing_replay=False)
    return made
