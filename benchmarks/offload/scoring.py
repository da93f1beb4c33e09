"""The ways to run the masked copies of OAR-P in PyTorch: the published one and ours. What each computed.

The published code (arXiv 2601.07408) makes a clean forward and one batch of copies of the whole sequence, each with the padding
token in place of one of its reasoning tokens: float32 logits of all positions, no cache. Where the batch does not fit into
memory it is cut into several.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import free_bytes
from benchmarks.offload.passes import Passes
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance.oar_p import divergence, log_distribution
from oar_plugin.credit.perturbation import Search, Unit, units
from oar_plugin.credit.probe import Probe
from oar_plugin.passes.masked_copies import Candidate, MaskedCopies
from oar_plugin.passes.request import Request

BUDGET = 0.3
PROBE: Probe = "answer_mean"

FORWARD_TOKENS = 8192
"""Tokens of one forward of `MaskedCopies`, and of a step of the engine."""

MEMORY_SHARE = 0.5
"""Of the memory that is left, what a published batch may take: estimates are rough, and other work needs some too."""


@dataclass(frozen=True)
class Response:
    """A sequence, and which of its response tokens are reasoning (the end included)."""

    candidate: Candidate
    reasoning: tuple[bool, ...]

    def offered(self, at_most: int | None) -> list[Unit]:
        """The reasoning tokens, each a unit: all, or so many spread evenly."""
        every = units(self.reasoning, 1)
        parts = len(every) if at_most is None else min(at_most, len(every))
        return [every[(2 * part + 1) * len(every) // (2 * parts)] for part in range(parts)]


def made_responses(passes: Passes) -> list[Response]:
    segments_BL = passes.segments_BL[:, passes.batch.prompt_length :]
    return [
        Response(Candidate.of(token_L, segments_L), tuple((segments_L == Segment.REASONING).tolist()))
        for token_L, segments_L in zip(passes.batch.token_BL, segments_BL, strict=True)
    ]


@dataclass
class Run:
    """What one run over some responses did. The defaults are those of work that has no copies."""

    importance: list[Tensor] = field(default_factory=list)  # one a response, `[L]`
    copies: int = 0  # that were scored
    tokens: int = 0  # that were computed, clean references included
    retried: int = 0  # requests that had to be made twice
    seconds: float = 0.0  # that it took
    busy_s: float = 0.0  # processor seconds of an engine that was to rest meanwhile

    def add(self, importance_L: Tensor, copies: int, tokens: int) -> None:
        """Account for a response."""
        self.importance.append(importance_L)
        self.copies += copies
        self.tokens += tokens


Work = Callable[[Sequence[Response], int | None], Run]
"""Takes some responses, and of each at most so many reasoning tokens (None: all)."""


@dataclass
class InTorch:
    """Candidates in plain PyTorch; `padding` replaces tokens, `at_once` is a number of copies in one published forward."""

    passes: Passes
    padding: int
    at_once: int

    def works(self) -> dict[str, Work]:
        return {
            "g2": partial(self.grpo, self.passes.log_prob),
            "g3": partial(self.grpo, self.passes.update),
            "p": partial(self.score, published=True),
            "l": self.score,
            "l30": partial(self.score, hybrid=True),
        }

    def grpo(self, work: Callable[[int | None], object], responses: Sequence[Response], at_most: int | None) -> Run:
        work(self._micro_batches(responses))
        return Run()

    def score(
        self, responses: Sequence[Response], at_most: int | None, published: bool = False, hybrid: bool = False
    ) -> Run:
        """Every token, the published way or ours; `hybrid`: the gradient of every token, then the tokens with the largest."""
        run, budget = Run(), 1.0
        gradients: Sequence[Any] = [None] * len(responses)
        request = Request(OarConfig(importance="oar_p"), PROBE, 0, replacement_token=self.padding)
        if hybrid:
            importance_BL = self.passes.importance(self._micro_batches(responses))
            gradients = importance_BL[:, self.passes.batch.prompt_length :].tolist()
            budget = BUDGET
        for response, gradient_L in zip(responses, gradients, strict=False):
            search = Search(response.offered(at_most), len(response.reasoning), budget, gradient_L)
            if published:
                exact, tokens = self._published(response.candidate, search.wanted)
            else:
                copies = MaskedCopies(self.passes.model, request, FORWARD_TOKENS)
                exact, tokens = copies.run(response.candidate, search.wanted), copies.tokens
            search.send(exact)
            assert search.importance is not None, "one round: all units, or those with the largest gradient"
            run.add(search.importance, len(exact), tokens)
        return run

    def _micro_batches(self, responses: Sequence[Response]) -> int | None:
        """The `limit` of `Passes`: all responses, or the first of them."""
        return None if len(responses) == len(self.passes.batch) else 1

    @torch.no_grad()
    def _published(self, candidate: Candidate, unit_list: list[Unit]) -> tuple[list[float], int]:
        def outcomes(token_KT: Tensor) -> Tensor:
            logits_KTV = self.passes.model(input_ids=token_KT, use_cache=False).logits
            logits_KTV = logits_KTV.to(torch.promote_types(logits_KTV.dtype, torch.float32))
            # In float64, unlike the published code: a vocabulary a copy costs nothing, and makes the KL comparable.
            return log_distribution(logits_KTV[:, candidate.answer_start - 1 : -1].mean(1))

        reference_V, scores = outcomes(candidate.token_T[None])[0], []
        for begin in range(0, len(unit_list), self.at_once):
            group = unit_list[begin : begin + self.at_once]
            token_KT = candidate.token_T.repeat(len(group), 1)
            for place, unit in enumerate(group):
                token_KT[place, [candidate.prompt_length + t for t in unit]] = self.padding
            scores += divergence(reference_V, outcomes(token_KT), PROBE).tolist()
        return scores, len(candidate.token_T) * (1 + len(unit_list))


def copies_that_fit(model: nn.Module, length: int) -> int:
    """Whole sequences of `length` tokens that the published way can put into one forward; at least one."""
    lm: Any = model
    config, weight = lm.config, next(model.parameters())
    logits = config.vocab_size * (4 if weight.dtype == torch.float32 else 4 + weight.element_size())
    activations = (8 * config.hidden_size + 3 * config.intermediate_size) * weight.element_size()
    return max(1, int(MEMORY_SHARE * free_bytes(weight.device)) // (length * (logits + activations)))
