"""Importances that were tried for chains of reasoning and are not in the package; README.md says how they did.

`python -m benchmarks learning --methods python:benchmarks.candidates.learning.importance:NAME` trains with one. They are
made of what `onward` is made of: Fisher norms of the answer's rows and of the reasoning's, with signs of their own for each
row, and a factor in the entropy.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oar_plugin.credit.importance import Backward, Importance, Parts, Rows
from oar_plugin.credit.importance.base import squared_norm
from oar_plugin.credit.importance.fisher import fisher_coefficients
from oar_plugin.credit.importance.onward import SURE, TEMPERATURE, decision, row_weights, to_highest


class _FisherNorms(Importance):
    """Fisher norms at `temperature`, each as a share of its response's highest, added with `shares`."""

    backwards: ClassVar[tuple[Backward, ...]] = (Backward("answer"), Backward("reasoning"))
    arbitrary_scale = False
    temperature = 1.0
    shares = (1.0, 1.0)

    def __init_subclass__(cls) -> None:
        cls.name, cls.help = cls.__name__, cls.__doc__ or ""

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        return fisher_coefficients(rows.logits_NV / self.temperature, rows.signs(), rows.vocabulary)

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient)

    def combine(self, parts: Parts) -> Tensor:
        norms = [to_highest(score_BL, parts.reasoning_BL) for score_BL in parts.score_KBL]
        return sum((share * norm_BL for share, norm_BL in zip(self.shares, norms, strict=False)), torch.zeros(()))


class _Undecided(_FisherNorms):
    """The same times uncertainty."""

    reads = frozenset({"entropy"})

    def combine(self, parts: Parts) -> Tensor:
        return super().combine(parts) * _undecided(parts)


def _undecided(parts: Parts) -> Tensor:
    return -torch.expm1(-parts.entropy_BL / SURE)


class Joint(_FisherNorms):
    """The answer's rows alone."""

    backwards = (Backward("answer"),)


class Later(_FisherNorms):
    """(a) All later rows, the answer's among them."""

    arbitrary_scale = True

    def combine(self, parts: Parts) -> Tensor:
        return parts.score_KBL.sum(0)


class SureLater(Later):
    """(d) All later rows, those of low entropy counting most: what follows from the context, not filler."""

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        weight_N = row_weights(rows.vocabulary.entropy(rows.logits_NV))
        return weight_N.sqrt()[:, None] * super().coefficients(number, rows)


class FisherUndecided(_Undecided):
    """(e) The answer's rows, times uncertainty."""

    backwards = (Backward("answer"),)


class Two(_FisherNorms):
    """Answer and later rows, each scaled, added; the policy's own distributions."""


class TwoFlat(Two):
    """The same at the temperature of `onward`."""

    temperature = TEMPERATURE


class ThreeToOneFlat(TwoFlat):
    """The answer's part weighing three times the other."""

    shares = (3.0, 1.0)


class ThreeToOneUndecided(_Undecided, ThreeToOneFlat):
    """The same times uncertainty: the first version of `onward`."""


class Uncertainty(_Undecided):
    """Control: uncertainty without influence."""

    backwards = ()

    def combine(self, parts: Parts) -> Tensor:
        return _undecided(parts)


class Decision(Uncertainty):
    """Control: the whole factor in the entropy that `onward` has, without influence."""

    def combine(self, parts: Parts) -> Tensor:
        return decision(parts.entropy_BL)
