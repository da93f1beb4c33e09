"""What an importance is: one object that an engine, a planner, a message or a benchmark reads all it needs from.

An importance says how much each reasoning token of a response matters. One that looks at gradients makes one or more
`Backward`s. Each starts from some rows of logits, weighted by `coefficients`, and reaches the input embeddings; `score` turns
gradient and embedding into a number a token, and `combine` makes one importance of these numbers. Whoever runs the model
(`oar_plugin.passes`) does the rest: `J = sum(coefficients * logits)` with the coefficients held fixed, so that no graph over
the vocabulary is needed, and a rank that holds a part of the rows or of the columns adds its part.

Shape suffixes: N rows, V vocabulary, T tokens, H hidden size, K backwards, B responses, L longest response.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from oar_plugin.credit.noise import signs
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

Reading = Literal["entropy", "log_prob"]


@dataclass(frozen=True)
class Backward:
    """One backward to the input embeddings.

    Attributes:
        rows: the logits that it starts from. `probe`: what `algorithm.oar.probe` says, pooled to one row a response for
            `last` and `answer_mean`, each row of the answer weighted by its share for `answer_joint`. `answer`: each of the
            probe's rows by itself. `reasoning`: each row that predicts a reasoning token. `later`: those and each row that
            predicts a token of the answer.
        noise: Gaussian noise of scale `algorithm.oar.sigma` stands on the reasoning embeddings. A clean forward comes first.
    """

    rows: Literal["probe", "answer", "reasoning", "later"] = "probe"
    noise: bool = False

    @property
    def of_reasoning(self) -> bool:
        """Whether it starts from rows that predict reasoning tokens."""
        return self.rows in ("reasoning", "later")


@dataclass(frozen=True)
class Copies:
    """Counterfactual copies: each masks some tokens and runs through the model (`oar_plugin.credit.perturbation`).

    Attributes:
        budget: `algorithm.oar.perturbation.budget` where the user sets none.
        by_gradient: the importance's own gradient chooses what a budget goes to; else blocks do.
    """

    budget: float = 1.0
    by_gradient: bool = False


@dataclass(frozen=True)
class Forward:
    """One forward of a gradient pass: what follows it, and whether the host takes log-probs from it."""

    backward: int | None  # which of `Importance.backwards`; None: none
    draw: int = 0  # of signs or noise, from 0
    log_probs: bool = False  # the host wants log-probs and entropy of it


@dataclass(frozen=True)
class Rows:
    """Rows of logits as `coefficients` sees them: a chunk of them at a time, no graph, float32 or better.

    Attributes:
        logits_NV: the rows; one a response where the probe pools them. The columns that this process holds.
        token_N: int64, the token that each row predicts; None where rows are pooled.
        seed_N: int64, of each row's random numbers: of (seed, training step, response, backward, draw, row).
        entropy_N: nats, at the temperature that responses were sampled with; for `reasoning` and `later` rows of an
            importance that reads it, else None.
        clean_NV: the same rows of the forward without noise; None where there is no noise or rows are not pooled.
        sigma: `algorithm.oar.sigma`.
        vocabulary: which columns this process holds, and how to sum over the others.
    """

    logits_NV: Tensor
    token_N: Tensor | None
    seed_N: Tensor
    entropy_N: Tensor | None = None
    clean_NV: Tensor | None = None
    sigma: float = 1e-3
    vocabulary: VocabularyShard = WHOLE_VOCABULARY

    def signs(self) -> Tensor:
        """Random signs, float32 `[N, V]`, the same on every layout."""
        return signs(self.seed_N, self.vocabulary.start, self.logits_NV.shape[-1])


@dataclass(frozen=True)
class Parts:
    """What a pass has measured of a batch of whole sequences, padded to one length; 0 where there is nothing.

    Attributes:
        score_KBL: float32, of each backward, the mean over draws.
        reasoning_BL: bool, the tokens that are scored.
        entropy_BL: float32, nats, of the distribution that a reasoning token was drawn from, if `reads` has it; of the
            answer's tokens too where a backward starts from `later` rows.
        log_prob_BL: float32, of the same tokens, if `reads` has it.
        seed_BL: int64, of each token's random numbers.
        sigma: `algorithm.oar.sigma`.
    """

    score_KBL: Tensor
    reasoning_BL: Tensor
    entropy_BL: Tensor
    log_prob_BL: Tensor
    seed_BL: Tensor
    sigma: float = 1e-3


class Importance:
    """Derive from it, and name the class in `algorithm.oar.importance=python:my_package.my_module:MyImportance`.

    Methods get tensors of the model's device, and may get no rows at all: make new tensors from those that are given.

    Attributes:
        name: how metrics and pages call it.
        help: one sentence for the user.
        backwards: see `Backward`; empty for an importance without gradients.
        copies: see `Copies`; None for an importance without copies.
        reads: what `combine` or `coefficients` wants of the distributions that reasoning tokens were drawn from.
        arbitrary_scale: scores have a scale that depends on the model (the Fisher norm's: 1 / embedding^2). Gates that look
            at sizes then see them as multiples of the response's mean. False where sizes mean something, as nats do.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    backwards: ClassVar[tuple[Backward, ...]] = ()
    copies: ClassVar[Copies | None] = None
    reads: ClassVar[frozenset[Reading]] = frozenset()
    arbitrary_scale: ClassVar[bool] = True

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        """What the logits are multiplied by in the scalar of backward `number`, `[N, V]`; no row's depend on another."""
        raise NotImplementedError

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        """A number a token from gradient and embedding, `[..., H]` to float32 `[...]`."""
        raise NotImplementedError

    def combine(self, parts: Parts) -> Tensor:
        """One importance, `[B, L]`, not negative; read where `reasoning_BL` is true."""
        return parts.score_KBL[0]

    def conflicts(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """What of `algorithm.oar`, defaults filled in, it cannot be combined with: key, value, why, what is allowed."""
        yield from ()

    # ---- what engines and planners read

    def forwards(self, draws: int, log_probs: bool = True) -> list[Forward]:
        """The forwards of one gradient pass, in order; the first is the one that the host makes anyway.

        Args:
            draws: `algorithm.oar.num_draws`.
            log_probs: the host wants log-probs and entropy.
        """
        plan = [Forward(number, draw) for draw in range(draws) for number in range(len(self.backwards))]
        if self.noisy or (self.reads and not self.backwards):
            plan.insert(0, Forward(None))
        return [replace(plan[0], log_probs=log_probs), *plan[1:]] if plan else []

    @property
    def noisy(self) -> bool:
        """Whether a backward starts from a noisy forward."""
        return any(backward.noise for backward in self.backwards)

    @property
    def reasoning_rows(self) -> bool:
        """Whether the rows that predict reasoning tokens are projected to the vocabulary, chunk by chunk."""
        return bool(self.reads) or any(backward.of_reasoning for backward in self.backwards)


def squared_norm(gradient: Tensor) -> Tensor:
    """`||g||^2`, `[..., H]` to float32 `[...]`."""
    return gradient.float().square().sum(-1)


def saliency(gradient: Tensor, embedding: Tensor) -> Tensor:
    """`|<g, e>|`, `[..., H]` to float32 `[...]`."""
    return torch.abs((gradient.float() * embedding.float()).sum(-1))
