"""The hook into vLLM's first model runner (`vllm.v1.worker.gpu_model_runner`), of which the CPU's is a subclass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oar_plugin.hosts.vllm.outcomes import OutcomeRecorder, Scheduled
from oar_plugin.hosts.vllm.tags import as_rows, spec_of, tag_of

HOOKED = "_get_prompt_logprobs_dict"

_Rows = dict[str, Any]  # request id to LogprobsTensors | None


def install(runner: Any, recorder: OutcomeRecorder) -> None:
    """Take tagged requests out of vLLM's hands where it makes prompt log-probabilities."""
    setattr(runner, HOOKED, _serve_tagged(runner, recorder, getattr(runner, HOOKED)))


def _serve_tagged(runner: Any, recorder: OutcomeRecorder, stock: Callable[..., _Rows]) -> Callable[..., _Rows]:
    def prompt_rows(hidden_states: Tensor, num_scheduled_tokens: dict[str, int], *others: Any) -> _Rows:
        waiting: dict[str, int] = runner.num_prompt_logprobs
        # Requests whose prompt has not ended, in an order that all tensor-parallel ranks share.
        tags = {request: tag_of(runner.requests[request].sampling_params) for request in waiting}
        tagged = {request: tag for request, tag in tags.items() if tag is not None}
        recorder.retain(runner.requests)
        if not tagged:
            return stock(hidden_states, num_scheduled_tokens, *others)
        held = {request: waiting.pop(request) for request in tagged}
        try:
            rows = stock(hidden_states, num_scheduled_tokens, *others)
        finally:
            waiting.update(held)

        items = []
        for request, tag in tagged.items():
            count = num_scheduled_tokens.get(request)
            if count is None:  # preempted
                continue
            state = runner.requests[request]
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]])
            token_ids = state.prompt_token_ids or []
            items.append(Scheduled(request, spec_of(request, tag), token_ids, state.num_computed_tokens, count, offset))
        found = recorder.step(hidden_states, items)
        if not found:
            return rows
        # vLLM wants these rows on the host: one transfer for all.
        numbers = torch.cat(list(found.values())).cpu().split([len(one) for one in found.values()])
        for request, its_numbers in zip(found, numbers, strict=True):
            rows[request] = as_rows(its_numbers)
            del waiting[request]
        return rows

    return prompt_rows
