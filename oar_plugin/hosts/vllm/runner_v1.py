"""The hook into vLLM's first model runner, of which the CPU's is a subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oar_plugin.hosts.vllm.outcomes import OutcomeRecorder, Scheduled
from oar_plugin.hosts.vllm.tags import as_rows, spec_of, tag_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

HOOKED = "_get_prompt_logprobs_dict"
"""The runner has it."""


def install(runner: GPUModelRunner, recorder: OutcomeRecorder) -> None:
    """Answer tagged requests in place of vLLM where it makes prompt log-probabilities."""
    stock = runner._get_prompt_logprobs_dict

    def prompt_rows(hidden_states: Tensor, num_scheduled_tokens: dict[str, int], *others: Any) -> dict[str, Any]:
        """By request id, LogprobsTensors or None."""
        waiting: dict[str, int] = runner.num_prompt_logprobs
        # Requests whose prompt has not ended, in an order that all tensor-parallel ranks share.
        tags = {request: tag_of(runner.requests[request].sampling_params) for request in waiting}
        tagged = {request: tag for request, tag in tags.items() if tag is not None}
        recorder.retain(runner.requests)
        if not tagged:
            return stock(hidden_states, num_scheduled_tokens, *others)
        held = {request: waiting.pop(request) for request in tagged}
        try:
            rows: dict[str, Any] = stock(hidden_states, num_scheduled_tokens, *others)
        finally:
            waiting.update(held)

        items = []
        batch: InputBatch = runner.input_batch
        for request, tag in tagged.items():
            count = num_scheduled_tokens.get(request)
            if count is None:  # preempted
                continue
            state: CachedRequestState = runner.requests[request]
            offset = int(runner.query_start_loc.np[batch.req_id_to_index[request]])
            token_ids = state.prompt_token_ids or []
            items.append(Scheduled(request, spec_of(request, tag), token_ids, state.num_computed_tokens, count, offset))
        outcomes = recorder.step(hidden_states, items)
        if not outcomes:
            return rows
        # vLLM wants these rows on the CPU: one transfer for all.
        numbers = torch.cat(list(outcomes.values())).cpu().split([len(one) for one in outcomes.values()])
        for request, its_numbers in zip(outcomes, numbers, strict=True):
            rows[request] = as_rows(its_numbers)
            del waiting[request]
        return rows

    runner._get_prompt_logprobs_dict = prompt_rows
