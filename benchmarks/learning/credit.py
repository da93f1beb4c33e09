"""The ways to spread a response's credit that `oar bench learning` compares: the package's importances, and two controls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.learning.rollout import Rollout
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request

Method = Callable[[LlamaForCausalLM, Rollout, Request], Tensor]
"""Importance `[B, L]` of a batch under a policy, read at reasoning tokens."""


def _measured(model: LlamaForCausalLM, rollout: Rollout, request: Request) -> Tensor:
    return batch_importance(model, request, rollout.token_BL, rollout.segments_BL, rollout.mask_BL)


METHODS: dict[str, Method | None] = {
    "grpo": None,
    "uniform": lambda model, rollout, request: torch.ones(rollout.token_BL.shape),
    "oracle": lambda model, rollout, request: rollout.causal_BL.float(),
    **dict.fromkeys(IMPORTANCES, _measured),
}
"""By name; None for plain GRPO."""


def method_of(name: str) -> Method | None:
    """A method by name, or an importance of one's own as `python:<module>:<class>`.

    Raises:
        ValueError: there is none of that name.
    """
    if name in METHODS:
        return METHODS[name]
    if not name.startswith("python:"):
        raise ValueError(f"method {name!r} is unknown; allowed: {', '.join(METHODS)}, or python:<module>:<class>")
    importance_of(name)
    return _measured


def is_importance(name: str) -> bool:
    """Whether a method is an importance, and not a control that knows more or less than one."""
    return method_of(name) is _measured
