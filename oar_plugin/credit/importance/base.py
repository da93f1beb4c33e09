"""The class `Importance`: how much each reasoning token of a response matters. Engines, planner and messages need nothing else.

An importance with gradients has one or more `Backward`s. A backward starts from rows of logits, weighted by `coefficients`, and
reaches the input embeddings; `score` computes a number per token from gradient and embedding; `combine` makes one importance of
the backwards' numbers. `oar_plugin.passes` runs the model: `J = sum(coefficients * logits)` with fixed coefficients, so that no
graph over the vocabulary is needed and each rank adds its part of the rows or columns.

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
        rows: the logits that it starts from. `probe`: the rows of `algorithm.oar.probe`, pooled to one row per response for
            `last` and `answer_mean`, weighted by their shares for `answer_joint`. `answer`: the probe's rows without pooling.
            `reasoning`: each row that predicts a reasoning token. `later`: each row that predicts a token of the reasoning or
            the answer.
        noise: Gaussian noise of scale `algorithm.oar.sigma` is added to the reasoning embeddings; a noise-free forward comes
            first.
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
        budget: default of `algorithm.oar.perturbation.budget`.
        by_gradient: the importance's own gradient chooses the units with a copy; else blocks do.
    """

    budget: float = 1.0
    by_gradient: bool = False


@dataclass(frozen=True)
class Forward:
    """One forward of a gradient pass."""

    backward: int | None  # index in `Importance.backwards` of the backward that follows; None: no backward
    draw: int = 0  # number of the draw of signs or noise, from 0
    log_probs: bool = False  # the host takes log-probs and entropy from this forward


@dataclass(frozen=True)
class Rows:
    """The argument of `coefficients`: a chunk of rows of logits, without a graph, float32 or better.

    Attributes:
        logits_NV: the rows, one per response where the probe pools them; the columns that this process holds.
        token_N: int64, the token that each row predicts; None for pooled rows.
        seed_N: int64, seed of each row's random numbers: a hash of (seed, training step, response, backward, draw, row).
        entropy_N: nats, at the sampling temperature; None unless the rows are `reasoning` or `later` and `reads` has it.
        clean_NV: the same rows of the noise-free forward; None without noise and for rows that are not pooled.
        sigma: `algorithm.oar.sigma`.
        vocabulary: the columns that this process holds, and how to sum over those of other processes.
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
    """The argument of `combine`: what a pass measured of a batch of whole sequences, padded to one length with 0.

    Attributes:
        score_KBL: float32, scores of each backward, means over draws.
        reasoning_BL: bool, the tokens to score.
        entropy_BL: float32, nats, of the distributions that reasoning tokens were drawn from, if `reads` has it; of answer
            tokens too if a backward starts from `later` rows.
        log_prob_BL: float32, of the same tokens, if `reads` has it.
        seed_BL: int64, seed of each token's random numbers.
        sigma: `algorithm.oar.sigma`.
    """

    score_KBL: Tensor
    reasoning_BL: Tensor
    entropy_BL: Tensor
    log_prob_BL: Tensor
    seed_BL: Tensor
    sigma: float = 1e-3


class Importance:
    """The base class of every importance; `algorithm.oar.importance=python:my_package.my_module:MyImportance` names your own.

    Methods get tensors on the model's device, sometimes without rows: create new tensors from those that are given.

    Attributes:
        name: its name in metrics and pages.
        help: one sentence for the user.
        backwards: its `Backward`s; empty for an importance without gradients.
        copies: its `Copies`; None for an importance without copies.
        reads: what `combine` or `coefficients` needs of the distributions that reasoning tokens were drawn from.
        arbitrary_scale: the scale of the scores depends on the model (Fisher norm: 1 / embedding^2), so gates that use their
            sizes get multiples of the response's mean. False for scores with a unit, such as nats.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    backwards: ClassVar[tuple[Backward, ...]] = ()
    copies: ClassVar[Copies | None] = None
    reads: ClassVar[frozenset[Reading]] = frozenset()
    arbitrary_scale: ClassVar[bool] = True

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        """The factors of the logits in the scalar of backward `number`, `[N, V]`; those of a row depend on that row only."""
        raise NotImplementedError

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        """One number per token from gradient and embedding, `[..., H]` to float32 `[...]`."""
        raise NotImplementedError

    def combine(self, parts: Parts) -> Tensor:
        """The importance, `[B, L]`: finite and not negative where `reasoning_BL` is true, anything elsewhere."""
        return parts.score_KBL[0]

    def conflicts(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Faults of the settings of `algorithm.oar`, defaults filled in: each with key, value, reason and what is allowed."""
        yield from ()

    # ---- for engines and planners

    def forwards(self, draws: int, log_probs: bool = True) -> list[Forward]:
        """The forwards of one gradient pass, in order; the host makes the first one anyway.

        Args:
            draws: `algorithm.oar.num_draws`.
            log_probs: the host needs log-probs and entropy.
        """
        plan = [Forward(number, draw) for draw in range(draws) for number in range(len(self.backwards))]
        if self.noisy or (self.reads and not self.backwards):
            plan.insert(0, Forward(None))
        return [replace(plan[0], log_probs=log_probs), *plan[1:]] if plan else []

    @property
    def noisy(self) -> bool:
        """Whether a backward starts from a perturbed forward."""
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
