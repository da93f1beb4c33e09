"""The class `Importance`: how much each reasoning token of a response matters.

Each `Backward` starts from the scalar `J = sum(coefficients * logits)`, whose coefficients are fixed, so that no graph over the
vocabulary is needed, and each rank adds its part of the rows or columns. It ends at the input embeddings.
Shape suffixes: N rows, V vocabulary, T tokens, H hidden size, K backwards, B responses, L longest response.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from oar_plugin.credit.noise import signs
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

Start = Literal["probe", "answer", "reasoning"]
Reading = Literal["entropy", "log_prob"]


@dataclass(frozen=True)
class Backward:
    """One backward to the input embeddings. `rows` are the logits that it starts from.

    * `probe`: the rows of `algorithm.oar.probe`, pooled to one row per response for `last` and `answer_mean`, weighted by
      their shares for `answer_joint`. `answer`: the probe's rows without pooling.
    * `reasoning`: each row that predicts a reasoning token.

    `noise` adds Gaussian noise of scale `algorithm.oar.sigma` to the reasoning embeddings, after a first noise-free forward.
    """

    rows: Start = "probe"
    noise: bool = False

    def __post_init__(self) -> None:
        if self.rows not in get_args(Start):
            raise ValueError(f"Backward(rows={self.rows!r}); allowed: {', '.join(get_args(Start))}")


@dataclass(frozen=True)
class Forward:
    backward: int | None  # index in `Importance.backwards` of the backward that follows; None: no backward
    draw: int = 0  # number of the draw of signs or noise, from 0
    log_probs: bool = False  # the host takes log-probs and entropy from this forward


@dataclass(frozen=True)
class Rows:
    """The argument of `coefficients`: a chunk of rows of logits, without a graph, float32 or better."""

    logits_NV: Tensor  # the columns that this process holds; one row per response if the probe pools rows
    token_N: Tensor | None  # int64, the token that each row predicts; None for pooled rows
    seed_N: Tensor  # int64, seed of each row's random numbers: a hash of (seed, step, response, backward, draw, row)
    entropy_N: Tensor | None = None  # nats, at the sampling temperature; only for `reasoning`, if read
    clean_NV: Tensor | None = None  # the same rows of the noise-free forward; only for pooled rows with noise
    sigma: float = 1e-3  # `algorithm.oar.sigma`
    vocabulary: VocabularyShard = WHOLE_VOCABULARY  # the columns of `logits_NV`, and sums over those of other processes

    def signs(self) -> Tensor:
        """Random signs, float32 `[N, V]`, the same on every layout."""
        return signs(self.seed_N, self.vocabulary.start, self.logits_NV.shape[-1])


@dataclass(frozen=True)
class Parts:
    """The argument of `combine`: the results of a pass over a batch of whole sequences, padded to one length with 0."""

    score_KBL: Tensor  # float32, scores of each backward, averaged over draws
    reasoning_BL: Tensor  # bool, the tokens to score
    seed_BL: Tensor  # int64, seed of each token's random numbers
    readings: Mapping[str, Tensor]  # what `Importance.reads` names; see the properties
    sigma: float = 1e-3  # `algorithm.oar.sigma`

    @property
    def entropy_BL(self) -> Tensor:
        """Entropy in nats, float32, of the distribution that each reasoning token was drawn from."""
        return self._reading("entropy")

    @property
    def log_prob_BL(self) -> Tensor:
        """Log-probability of the same tokens, float32."""
        return self._reading("log_prob")

    def _reading(self, name: str) -> Tensor:
        if name not in self.readings:
            needed = ", ".join(f'"{one}"' for one in sorted({*self.readings, name}))
            raise AttributeError(f"{name}_BL is not computed; write reads = frozenset({{{needed}}}) in the class")
        return self.readings[name]


class Importance:
    """The base class of every importance; `algorithm.oar.importance=python:my_package.my_module:MyImportance` names your own.

    `coefficients` and `score` get tensors on the model's device, sometimes without rows, `combine` on the CPU: create new
    tensors from those that are given. On a GPU, `item`, `nonzero` or a bool mask as index makes the CPU wait for it.
    """

    name: ClassVar[str] = ""  # in metrics and pages
    help: ClassVar[str] = ""  # one sentence for the user
    backwards: ClassVar[tuple[Backward, ...]] = ()
    # The scores come from masked copies of the response (`oar_plugin.credit.perturbation`), and from nothing else.
    copies: ClassVar[bool] = False
    # what `combine` or `coefficients` needs of the distributions that reasoning tokens were drawn from
    reads: ClassVar[frozenset[Reading]] = frozenset()
    # The scale of the scores depends on the model (Fisher norm: 1 / embedding^2): gates that use it get scores divided by the
    # response's mean. False: the scores have a unit, such as nats.
    arbitrary_scale: ClassVar[bool] = True

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        """The factors of the logits in the scalar of backward `number`, `[N, V]`; those of a row depend on that row only."""
        raise NotImplementedError("it has backwards and no method coefficients (the factor of each logit)")

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        """One number per token from gradient and embedding, `[..., H]` to float32 `[...]`."""
        raise NotImplementedError("it has backwards and no method score (one number per token from its gradient)")

    def combine(self, parts: Parts) -> Tensor:
        """The importance, `[B, L]`: finite and not negative where `reasoning_BL` is true, anything elsewhere."""
        if (count := len(self.backwards)) != 1:
            raise NotImplementedError(f"{count} backwards and no method combine that makes the importance")
        return parts.score_KBL[0]

    def forwards(self, draws: int) -> list[Forward]:
        """The forwards of one gradient pass, in order."""
        plan = [Forward(number, draw) for draw in range(draws) for number in range(len(self.backwards))]
        return [Forward(None), *plan] if self.noisy or (self.reads and not self.backwards) else plan

    @property
    def noisy(self) -> bool:
        return any(backward.noise for backward in self.backwards)

    @property
    def reasoning_rows(self) -> bool:
        """Whether the rows that predict reasoning tokens are projected to the vocabulary, chunk by chunk."""
        return bool(self.reads) or any(backward.rows == "reasoning" for backward in self.backwards)


def squared_norm(gradient: Tensor) -> Tensor:
    """`||g||^2`, `[..., H]` to float32 `[...]`."""
    return gradient.float().square().sum(-1)


def saliency(gradient: Tensor, embedding: Tensor) -> Tensor:
    """`|<g, e>|`, `[..., H]` to float32 `[...]`."""
    return torch.abs((gradient.float() * embedding.float()).sum(-1))
