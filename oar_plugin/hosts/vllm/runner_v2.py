"""The hook into vLLM's second model runner, its default on GPUs for more and more models.

The runner copies its results to the CPU asynchronously, so nothing here may wait for the device either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from oar_plugin.hosts.vllm.outcomes import OutcomeRecorder, Scheduled, Spec
from oar_plugin.hosts.vllm.tags import as_rows, spec_of, tag_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu.states import RequestState

HOOKED = "prompt_logprobs_worker"
"""The runner has it."""


def install(runner: GPUModelRunner, recorder: OutcomeRecorder) -> None:
    """Answer tagged requests in place of vLLM where it makes prompt log-probabilities."""
    worker: PromptLogprobsWorker = runner.prompt_logprobs_worker
    states: RequestState = runner.req_states
    stock_add, stock_rows = runner.add_requests, worker.compute_prompt_logprobs
    # Tagged requests whose prompt has not ended, with their prompts.
    pending: dict[str, tuple[Spec | None, list[int]]] = {}

    def add_requests(scheduler_output: SchedulerOutput, *others: Any) -> None:
        stock_add(scheduler_output, *others)
        new: NewRequestData
        for new in scheduler_output.scheduled_new_reqs:  # resumed ones after a preemption, too
            pending.pop(new.req_id, None)
            if (tag := tag_of(new.sampling_params)) is not None:
                pending[new.req_id] = (spec_of(new.req_id, tag), new.prompt_token_ids)
                worker.uses_prompt_logprobs[states.req_id_to_index[new.req_id]] = False

    def compute_prompt_logprobs(
        logits_fn: Any, hidden_states: Tensor, input_batch: InputBatch, *others: Any
    ) -> dict[str, Any]:
        rows: dict[str, Any] = stock_rows(logits_fn, hidden_states, input_batch, *others)
        known = states.req_id_to_index
        recorder.retain(known)
        for gone in pending.keys() - known.keys():
            del pending[gone]
        if not pending:
            return rows
        items = []
        for i, request in enumerate(input_batch.req_ids):  # in an order that all tensor-parallel ranks share
            if request in pending:
                spec, token_ids = pending[request]
                first, count = input_batch.num_computed_prefill_tokens_np[i], input_batch.num_scheduled_tokens[i]
                offset = input_batch.query_start_loc_np[i]
                items.append(Scheduled(request, spec, token_ids, int(first), int(count), int(offset)))
        for request, numbers in recorder.step(hidden_states, items).items():
            rows[request] = as_rows(numbers)
            del pending[request]
        return rows

    runner.add_requests = add_requests
    worker.compute_prompt_logprobs = compute_prompt_logprobs
