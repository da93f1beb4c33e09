"""The ways to spread a response's credit that `oar bench learning` compares.

Gradient estimators and masked copies are the package's own, driven as its engines drive them. Every other method is a function
of what a `CreditPass` offers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from oar_plugin.bench.gradient_pass import gradient_scores
from oar_plugin.bench.learning_rollout import Rollout
from oar_plugin.bench.passes import log_prob_and_entropy
from oar_plugin.bench.reasoning.vocabulary import PAD
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.gradient import fisher_importance
from oar_plugin.credit.noise import position_seeds, response_seeds, signs
from oar_plugin.credit.onward import TEMPERATURE, onward_coefficients, onward_importance, row_weights
from oar_plugin.credit.perturbation import units
from oar_plugin.credit.probe import Probe
from oar_plugin.passes.masked_copies import Candidate, MaskedCopies, Replacements
from oar_plugin.hosts.micro_batch import MicroBatchScorer
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps

COPIED_TOKENS = 2**13
"""Tokens of one forward of masked copies."""


class CreditPass:
    """A batch of rollouts under a policy, and what importance can be made from.

    Args:
        model: the policy; its parameters and their gradients are left alone.
        rollout: the responses.
        probe: what "the answer distribution" is.
        seed: of signs, noise and random importance.
    """

    def __init__(self, model: LlamaForCausalLM, rollout: Rollout, probe: Probe, seed: int) -> None:
        self.model, self.rollout, self.probe, self.seed = model, rollout, probe, seed
        self.backwards = 0
        """Backward passes made so far."""
        self._taps: ModelTaps | None = None

    def gradient(self, importance: str) -> Tensor:
        """Importance `[B, L]` by one of the package's gradient estimators, `fisher` or `oar_g`."""
        rollout = self.rollout
        rows, length = rollout.token_BL.shape
        request = Request(
            importance=importance,  # type: ignore[arg-type]
            probe=self.probe,
            sigma=1e-3,
            num_draws=1,
            seed=self.seed,
            answer_patterns=("hash",),
            max_response_length=length,
        )
        scorer = MicroBatchScorer(
            request,
            rollout.segments_BL.flatten(),
            rollout.token_BL.flatten(),
            torch.arange(0, rows * length + 1, length),
            torch.arange(rows * length),
            rows * length,
            lambda tensor: tensor,
        )
        self.backwards += 1
        return gradient_scores(self.model, rollout.token_BL, scorer)

    def copies(self) -> Tensor:
        """Importance `[B, L]` by OAR-P: every reasoning token in turn replaced by padding."""
        rollout = self.rollout
        runner = MaskedCopies(self.model, self.probe, Replacements(PAD), COPIED_TOKENS)
        importance_BL = torch.zeros(rollout.token_BL.shape)
        for row in (rollout.status_B == Status.SCORED).nonzero()[:, 0].tolist():
            segments_L = rollout.segments_BL[row]
            answer = (segments_L == Segment.ANSWER).nonzero()[:, 0]
            start, end = int(answer[0]), int(answer[-1]) + 1
            candidate = Candidate(rollout.token_BL[row, :end], rollout.prompt_length, start)
            unit_list = units((segments_L[rollout.prompt_length : end] == Segment.REASONING).tolist(), 1)
            scores = runner.run(candidate, unit_list)
            for unit, score in zip(unit_list, scores, strict=True):
                importance_BL[row, rollout.prompt_length + unit[0]] = score
        return importance_BL

    # ---- for importances made of several Fisher norms

    def __enter__(self) -> CreditPass:
        """One forward whose graph every call of `fisher_norm` shares."""
        rollout = self.rollout
        rows, length = rollout.token_BL.shape
        # The rows that predict a response's tokens: one position before each.
        self._target_N = rollout.response_BL.flatten().nonzero()[:, 0]
        self._taps = taps = ModelTaps(self.model).__enter__()
        self._forward(taps, self._target_N - 1)
        assert taps.answer_logits is not None
        self._logits_NV = taps.answer_logits
        response_T = torch.arange(rows).repeat_interleave(length)
        seed_B = response_seeds(rollout.token_BL.flatten(), response_T, rows, self.seed)
        seed_N = position_seeds(seed_B[self._target_N // length], self._target_N % length)
        self._sign_NV = signs(seed_N, 0, self._logits_NV.shape[-1])
        log_prob_N, entropy_N = log_prob_and_entropy(
            self._logits_NV.detach(), rollout.token_BL.flatten()[self._target_N]
        )
        self.log_prob_BL, self.entropy_BL = self._scatter(log_prob_N), self._scatter(entropy_N)
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._taps is not None
        self._taps.__exit__(*error)
        self._taps = None
        del self._logits_NV, self._sign_NV

    def fisher_norm(self, weight_BL: Tensor, temperature: float = 1.0) -> Tensor:
        """One backward: Fisher norm of every token with respect to a weighted set of next-token distributions.

        Args:
            weight_BL: `[B, L]`, of the distribution that token `t` was drawn from, in units of its Fisher information
                (the scalar's coefficients get the root); read at response tokens.
            temperature: of the distributions whose Fisher information is taken; 1 for the policy's own.

        Returns:
            float32 `[B, L]`, `||d / de_t sum_s sqrt(weight_s) c_s . z_s||^2`.
        """
        assert self._taps is not None
        assert self._taps.embedding is not None
        weight_N = weight_BL.flatten()[self._target_N].clamp_min(0)
        coefficient_NV = onward_coefficients(self._logits_NV.detach(), weight_N, self._sign_NV, temperature)
        scalar = (coefficient_NV * self._logits_NV).sum()
        (gradient,) = torch.autograd.grad(scalar, self._taps.embedding, retain_graph=True)
        self.backwards += 1
        return fisher_importance(gradient)

    def _scatter(self, value_N: Tensor) -> Tensor:
        flat = torch.zeros(self.rollout.token_BL.numel())
        flat[self._target_N] = value_N
        return flat.view_as(self.rollout.token_BL)

    def _forward(self, taps: ModelTaps, row_N: Tensor, noise: Callable[[Tensor], Tensor] | None = None) -> None:
        taps.prepare(row_N, noise, rows_only=True)
        self.model(input_ids=self.rollout.token_BL, use_cache=False)


Method = Callable[[CreditPass], Tensor]
"""Importance `[B, L]` of a batch, read at reasoning tokens."""


def _random(credit: CreditPass) -> Tensor:
    generator = torch.Generator().manual_seed(credit.seed)
    return torch.randn(credit.rollout.token_BL.shape, generator=generator).abs()


def _entropy(credit: CreditPass) -> Tensor:
    with credit:
        return credit.entropy_BL


def _onward(credit: CreditPass) -> Tensor:
    rollout = credit.rollout
    with credit:
        answer_BL = credit.fisher_norm(rollout.answer_BL.float(), TEMPERATURE)
        onward_BL = credit.fisher_norm(row_weights(credit.entropy_BL) * rollout.reasoning_BL, TEMPERATURE)
        return onward_importance(answer_BL, onward_BL, credit.entropy_BL, rollout.reasoning_BL)


METHODS: dict[str, Method | None] = {
    "grpo": None,
    "uniform": lambda credit: torch.ones(credit.rollout.token_BL.shape),
    "random": _random,
    "oracle": lambda credit: credit.rollout.causal_BL.float(),
    "entropy": _entropy,
    "fisher": lambda credit: credit.gradient("fisher"),
    "onward": _onward,
    "oar_g": lambda credit: credit.gradient("oar_g"),
    "oar_p": lambda credit: credit.copies(),
}
"""By name; None for plain GRPO."""


def method_of(name: str) -> Method | None:
    """A method by name, or one's own as `module:function`.

    Raises:
        ValueError: there is none of that name.
    """
    if name in METHODS:
        return METHODS[name]
    found: Method = function_of(name, f"method {name!r} is unknown; allowed: {', '.join(METHODS)}, or module:function")
    return found


def function_of(name: str, complaint: str) -> Any:
    """What `module:function` names.

    Raises:
        ValueError: `complaint`, and why.
    """
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(complaint)
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{complaint} ({error})") from error
