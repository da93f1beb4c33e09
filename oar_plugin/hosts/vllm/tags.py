"""The tag of a request, which says what it is for, and the rows by which the worker's numbers are returned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oar_plugin.hosts.vllm.outcomes import Spec, read_spec

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors

TAG = "oar"
"""The key in `SamplingParams.extra_args` under which a spec's `to_dict` stands."""

logger = logging.getLogger(__name__)


def tag_of(sampling_params: Any) -> dict[str, Any] | None:
    """The tag of a request, or None. Pooling requests have no sampling parameters."""
    extra_args = sampling_params.extra_args if sampling_params is not None else None
    return extra_args.get(TAG) if extra_args else None


def spec_of(request: str, tag: dict[str, Any]) -> Spec | None:
    """None, and a warning, where a tag makes no sense: an exception would end the engine, and generation with it."""
    try:
        return read_spec(tag)
    except (TypeError, ValueError):
        logger.warning("request %s cannot be scored", request, exc_info=True)
        return None


def as_rows(numbers: Tensor) -> LogprobsTensors:
    """Row `i` is number `i` as the log-probability of token 0, where the numbers are."""
    from vllm.v1.outputs import LogprobsTensors

    zeros = torch.zeros(len(numbers), dtype=torch.int32, device=numbers.device)
    return LogprobsTensors(logprob_token_ids=zeros[:, None], logprobs=numbers[:, None], selected_token_ranks=zeros)
