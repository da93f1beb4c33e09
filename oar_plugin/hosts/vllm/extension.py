"""The extension of vLLM's workers: tagged requests return outcomes in place of prompt log-probabilities.

A tagged request has a spec of `outcomes` in `SamplingParams.extra_args["oar"]`, and `prompt_logprobs=0`, so that vLLM returns
rows for its prompt. vLLM handles others as usual. It has two model runners: the CPU's is a subclass of the first one, and on
GPUs the second one is the default for more and more models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oar_plugin.hosts.vllm.outcomes import TAG, OutcomeRecorder, Scheduled, Spec, read_spec
from oar_plugin.output import logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner


class OutcomeExtension:
    """Class for vLLM's `worker_extension_cls`. Its methods are called through `collective_rpc`."""

    model_runner: Any

    def oar_install(self) -> None:
        """Make the worker return outcomes for tagged requests, once. RuntimeError: the model runner is unknown."""
        runner = self.model_runner
        if hasattr(runner, "oar_recorder"):
            return
        if getattr(runner, "_get_prompt_logprobs_dict", None) is not None:
            install: Callable[[Any, OutcomeRecorder], None] = _install_first
        elif getattr(runner, "prompt_logprobs_worker", None) is not None:
            install = _install_second
        else:
            fault = f"OAR-P cannot be computed in vLLM's model runner {type(runner).__module__}.{type(runner).__name__}"
            lacks = "which has neither _get_prompt_logprobs_dict nor prompt_logprobs_worker"
            raise RuntimeError(f"{fault}, {lacks}: set algorithm.oar.perturbation.backend=actor")
        model = runner.get_model()
        # Call the class's function. verl replaces the instance's function by one that masks tokens that must not be
        # sampled, but the actor's distribution includes these tokens.
        recorder = OutcomeRecorder(lambda hidden_RD: type(model).compute_logits(model, hidden_RD))
        install(runner, recorder)
        runner.oar_recorder = recorder


def _install_first(runner: FirstRunner, recorder: OutcomeRecorder) -> None:
    """Replace the first runner's function for prompt log-probabilities by one that also answers tagged requests."""
    stock = runner._get_prompt_logprobs_dict

    def prompt_rows(hidden_states: Tensor, num_scheduled_tokens: dict[str, int], *others: Any) -> dict[str, Any]:
        """Return a dictionary: request id -> LogprobsTensors or None."""
        waiting: dict[str, int] = runner.num_prompt_logprobs
        # Requests whose prompt is not completely computed yet, in the same order on all tensor-parallel ranks.
        specs = {request: spec_of(runner.requests[request].sampling_params) for request in waiting}
        tagged = {request: spec for request, spec in specs.items() if spec is not None}
        recorder.retain(runner.requests)
        if not tagged:
            return stock(hidden_states, num_scheduled_tokens, *others)
        held = {request: waiting.pop(request) for request in tagged}
        try:
            rows: dict[str, Any] = stock(hidden_states, num_scheduled_tokens, *others)
        finally:
            waiting.update(held)

        items = []
        for request, spec in tagged.items():
            count = num_scheduled_tokens.get(request)
            if count is None:  # preempted
                continue
            state = runner.requests[request]
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]])
            token_ids = state.prompt_token_ids or []
            items.append(Scheduled(request, spec, token_ids, state.num_computed_tokens, count, offset))
        outcomes = recorder.step(hidden_states, items)
        if not outcomes:
            return rows
        # vLLM expects these rows on the CPU: copy all of them in one transfer.
        parts = torch.cat(list(outcomes.values())).cpu().split([len(numbers) for numbers in outcomes.values()])
        for request, numbers in zip(outcomes, parts, strict=True):
            rows[request] = as_rows(numbers)
            del waiting[request]
        return rows

    runner._get_prompt_logprobs_dict = prompt_rows


def _install_second(runner: SecondRunner, recorder: OutcomeRecorder) -> None:
    """The same for the second runner. It copies to the CPU asynchronously, so this must not wait for the device."""
    worker, states = runner.prompt_logprobs_worker, runner.req_states
    stock_add, stock_rows = runner.add_requests, worker.compute_prompt_logprobs
    # request id -> (spec, prompt) of tagged requests whose prompt is not completely computed yet
    pending: dict[str, tuple[Spec, list[int]]] = {}

    def add_requests(scheduler_output: SchedulerOutput, *others: Any) -> None:
        stock_add(scheduler_output, *others)
        for new in scheduler_output.scheduled_new_reqs:  # also requests that resume after a preemption
            pending.pop(new.req_id, None)
            if (spec := spec_of(new.sampling_params)) is not None:
                pending[new.req_id] = (spec, new.prompt_token_ids)
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
        for i, request in enumerate(input_batch.req_ids):  # in the same order on all tensor-parallel ranks
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


def spec_of(sampling_params: Any) -> Spec | None:
    """Return a tagged request's spec; None for other requests. Pooling requests have no sampling parameters."""
    tag = (getattr(sampling_params, "extra_args", None) or {}).get(TAG)
    try:
        return None if tag is None else read_spec(tag)
    except (TypeError, ValueError):  # an exception would end the engine
        logger.warning("a request with the tag %s cannot be scored: it is handled as usual", tag, exc_info=True)
        return None


def as_rows(numbers: Tensor) -> LogprobsTensors:
    """Return rows on the device of `numbers`. In row `i`, the log-probability of token 0 is number `i`."""
    from vllm.v1.outputs import LogprobsTensors

    zeros = torch.zeros(len(numbers), dtype=torch.int32, device=numbers.device)
    return LogprobsTensors(logprob_token_ids=zeros[:, None], logprobs=numbers[:, None], selected_token_ranks=zeros)
