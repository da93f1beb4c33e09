"""What runs inside vLLM's workers: tagged requests come back with outcomes in place of prompt log-probabilities.

A request is tagged by `SamplingParams.extra_args["oar"]` (`OutcomeSpec.to_dict`) and asks for `prompt_logprobs=0`, which is
what makes vLLM keep its place in the prompt and hand rows back with it. Row `i` of what it gets is number `i` of
`OutcomeRecorder.step` as the log-probability of token 0. Untagged requests are vLLM's own business throughout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oar_plugin.hosts.vllm.outcomes import NO_REFERENCE, OutcomeRecorder, OutcomeSpec, Scheduled

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors

TAG = "oar"

logger = logging.getLogger(__name__)


class OutcomeExtension:
    """For `worker_extension_cls`; its methods are reached by `collective_rpc`."""

    model_runner: Any

    def oar_install(self) -> None:
        """Serve tagged requests from now on. A second call changes nothing.

        Raises:
            RuntimeError: the worker has a model runner whose prompt rows cannot be reached.
        """
        runner = self.model_runner
        if hasattr(runner, "oar_recorder"):
            return
        if not hasattr(runner, "_get_prompt_logprobs_dict"):
            raise RuntimeError(
                f"OAR-P cannot be computed in vLLM's model runner {type(runner).__module__}.{type(runner).__name__}: set "
                "VLLM_USE_V2_MODEL_RUNNER=0 in the environment of the run, or algorithm.oar.perturbation.backend=actor"
            )
        model = runner.get_model()

        def project(hidden_RD: Tensor) -> Tensor | None:
            # The class's function: hosts replace the instance's by one that masks tokens which must not be sampled,
            # and these belong to the distribution as the actor computes it.
            return type(model).compute_logits(model, hidden_RD)

        runner.oar_recorder = OutcomeRecorder(project)
        runner._get_prompt_logprobs_dict = _serve_tagged(runner, runner._get_prompt_logprobs_dict)

    def oar_forget(self, keys: Sequence[str]) -> None:
        """Drop what belongs to these references."""
        self.model_runner.oar_recorder.forget(keys)

    def oar_counts(self) -> dict[str, int]:
        return self.model_runner.oar_recorder.counts()


_Rows = dict[str, Any]  # request id to LogprobsTensors | None


def _serve_tagged(runner: Any, stock: Callable[[Tensor, dict[str, int]], _Rows]) -> Callable[..., _Rows]:
    """`_get_prompt_logprobs_dict` of `runner`, with tagged requests taken out of vLLM's hands."""
    recorder: OutcomeRecorder = runner.oar_recorder

    def prompt_rows(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> _Rows:
        waiting: dict[str, int] = runner.num_prompt_logprobs
        # Requests whose prompt has not ended, in an order that all tensor-parallel ranks share.
        tags = {request: _tag(runner.requests[request]) for request in waiting}
        tagged = {request: tag for request, tag in tags.items() if tag is not None}
        recorder.retain(runner.requests)
        if not tagged:
            return stock(hidden_states, num_scheduled_tokens)
        held = {request: waiting.pop(request) for request in tagged}
        try:
            rows = stock(hidden_states, num_scheduled_tokens)
        finally:
            waiting.update(held)

        found: dict[str, list[float]] = {}
        items = []
        for request, tag in tagged.items():
            count = num_scheduled_tokens.get(request)
            if count is None:  # preempted
                continue
            state = runner.requests[request]
            first, token_ids = state.num_computed_tokens, state.prompt_token_ids or []
            try:
                spec = OutcomeSpec.from_dict(tag)
            except (TypeError, ValueError, KeyError):
                # An exception here would end the engine, and generation with it.
                logger.warning("request %s cannot be scored", request, exc_info=True)
                if first + count >= len(token_ids):
                    found[request] = [math.nan, NO_REFERENCE]
                continue
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]])
            items.append(Scheduled(request, spec, token_ids, first, count, offset))
        found.update(recorder.step(hidden_states, items))
        for request, numbers in found.items():
            rows[request] = _as_rows(numbers)
            del waiting[request]
        return rows

    return prompt_rows


def _tag(state: Any) -> dict[str, Any] | None:
    extra_args = state.sampling_params.extra_args if state.sampling_params is not None else None
    return extra_args.get(TAG) if extra_args else None


def _as_rows(numbers: list[float]) -> LogprobsTensors:
    """Float32 is exact for token ids up to 2^24."""
    from vllm.v1.outputs import LogprobsTensors

    rows = LogprobsTensors.empty_cpu(len(numbers), 1)
    rows.logprob_token_ids.zero_()
    rows.logprobs[:, 0].copy_(torch.tensor(numbers))
    rows.selected_token_ranks.zero_()
    return rows
