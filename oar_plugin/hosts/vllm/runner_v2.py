"""The hook into vLLM's second model runner (`vllm.v1.worker.gpu.model_runner`), its default on GPUs for more and more models.

It copies its results to the host behind the step's back, so nothing here may wait for the device either.
"""

from typing import Any

from torch import Tensor

from oar_plugin.hosts.vllm.outcomes import OutcomeRecorder, Scheduled, Spec
from oar_plugin.hosts.vllm.tags import as_rows, spec_of, tag_of

HOOKED = "prompt_logprobs_worker"


def install(runner: Any, recorder: OutcomeRecorder) -> None:
    """Take tagged requests out of vLLM's hands where it makes prompt log-probabilities."""
    worker = runner.prompt_logprobs_worker
    stock_add, stock_rows = runner.add_requests, worker.compute_prompt_logprobs
    pending: dict[
        str, tuple[Spec | None, list[int]]
    ] = {}  # tagged requests whose prompt has not ended, with their prompts

    def add_requests(scheduler_output: Any, *others: Any) -> None:
        stock_add(scheduler_output, *others)
        for new in scheduler_output.scheduled_new_reqs:  # resumed ones after a preemption, too
            pending.pop(new.req_id, None)
            if (tag := tag_of(new.sampling_params)) is not None:
                pending[new.req_id] = (spec_of(new.req_id, tag), new.prompt_token_ids)
                worker.uses_prompt_logprobs[runner.req_states.req_id_to_index[new.req_id]] = False

    def compute_prompt_logprobs(
        logits_fn: Any, hidden_states: Tensor, input_batch: Any, *others: Any
    ) -> dict[str, Any]:
        rows: dict[str, Any] = stock_rows(logits_fn, hidden_states, input_batch, *others)
        known = runner.req_states.req_id_to_index
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
