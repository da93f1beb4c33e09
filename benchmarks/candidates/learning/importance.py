"""Importances that were tried for chains of reasoning and are not in the package; README.md says how they did.

Each takes a `CreditPass` and returns `[B, L]`: `oar bench learning --methods
benchmarks.candidates.learning.importance:NAME` trains with it (from the repository's root, with `PYTHONPATH=.`). `T` is
the temperature of `oar_plugin.credit.onward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.bench.learning_credit import CreditPass
from oar_plugin.credit.onward import SURE, TEMPERATURE


def _scaled(credit: CreditPass, importance_BL: Tensor) -> Tensor:
    """To a highest score of 1 in each response, over its reasoning."""
    kept_BL = importance_BL * credit.rollout.reasoning_BL
    return kept_BL / kept_BL.amax(-1, keepdim=True).clamp_min(1e-30)


def _answer(credit: CreditPass, temperature: float = 1.0) -> Tensor:
    return _scaled(credit, credit.fisher_norm(credit.rollout.answer_BL.float(), temperature))


def _later(credit: CreditPass, temperature: float = 1.0) -> Tensor:
    return _scaled(credit, credit.fisher_norm(credit.rollout.reasoning_BL.float(), temperature))


def _undecided(credit: CreditPass) -> Tensor:
    return -torch.expm1(-credit.entropy_BL / SURE)


def _passed(credit: CreditPass, hops: int, temperature: float = 1.0) -> Tensor:
    """(b) The answer first, then again and again the rows that predict what was found: the largest of all hops."""
    weight_BL = credit.rollout.answer_BL.float()
    largest_BL = torch.zeros(weight_BL.shape)
    for _ in range(hops):
        weight_BL = _scaled(credit, credit.fisher_norm(weight_BL, temperature))
        largest_BL = torch.maximum(largest_BL, weight_BL)
    return largest_BL


def _at_once(credit: CreditPass, answer_weight: float, temperature: float) -> Tensor:
    """One backward for answer and reasoning; the answer's rows together weigh `answer_weight` times the reasoning's."""
    rollout = credit.rollout
    share_B1 = (
        answer_weight
        * rollout.reasoning_BL.sum(-1, keepdim=True)
        / rollout.answer_BL.sum(-1, keepdim=True).clamp_min(1)
    )
    return _scaled(credit, credit.fisher_norm(rollout.reasoning_BL + rollout.answer_BL * share_B1, temperature))


def joint(credit: CreditPass) -> Tensor:
    """The answer's rows alone, signs of their own for each."""
    with credit:
        return _answer(credit)


def later(credit: CreditPass) -> Tensor:
    """(a) All later rows, answer included, one backward."""
    with credit:
        return credit.fisher_norm((credit.rollout.reasoning_BL | credit.rollout.answer_BL).float())


def sure_later(credit: CreditPass) -> Tensor:
    """(d) All later rows, those of low entropy counting most: what follows from the context, not filler."""
    rollout = credit.rollout
    with credit:
        sure_BL = (-2 * credit.entropy_BL).exp()
        return credit.fisher_norm(sure_BL * (rollout.reasoning_BL | rollout.answer_BL))


def passed_2(credit: CreditPass) -> Tensor:
    """(b) Two hops."""
    with credit:
        return _passed(credit, 2)


def passed_3_flat(credit: CreditPass) -> Tensor:
    """(b) Three hops at T."""
    with credit:
        return _passed(credit, 3, TEMPERATURE)


def passed_6_flat(credit: CreditPass) -> Tensor:
    """(b) Six hops at T."""
    with credit:
        return _passed(credit, 6, TEMPERATURE)


def power(credit: CreditPass) -> Tensor:
    """(c) All later rows, then the rows that this found, with the answer."""
    rollout = credit.rollout
    with credit:
        return credit.fisher_norm(_later(credit) + rollout.answer_BL)


def fisher_undecided(credit: CreditPass) -> Tensor:
    """(e) The answer's rows, times uncertainty."""
    with credit:
        return _answer(credit) * _undecided(credit)


def two(credit: CreditPass) -> Tensor:
    """Answer and later rows, each scaled, added; the policy's own distributions."""
    with credit:
        return _answer(credit) + _later(credit)


def two_flat(credit: CreditPass) -> Tensor:
    """The same at T."""
    with credit:
        return _answer(credit, TEMPERATURE) + _later(credit, TEMPERATURE)


def three_to_one_flat(credit: CreditPass) -> Tensor:
    """The answer's part weighing three times the other."""
    with credit:
        return 3 * _answer(credit, TEMPERATURE) + _later(credit, TEMPERATURE)


def three_to_one_undecided(credit: CreditPass) -> Tensor:
    """The same times uncertainty: the first version of `onward`."""
    with credit:
        return (3 * _answer(credit, TEMPERATURE) + _later(credit, TEMPERATURE)) * _undecided(credit)


def at_once_flat(credit: CreditPass) -> Tensor:
    """`two_flat` in one backward, the answer's rows weighing four times the others."""
    with credit:
        return _at_once(credit, 4.0, TEMPERATURE)


def at_once_undecided(credit: CreditPass) -> Tensor:
    """The same times uncertainty."""
    with credit:
        return _at_once(credit, 4.0, TEMPERATURE) * _undecided(credit)


def uncertainty(credit: CreditPass) -> Tensor:
    """Control: uncertainty without influence."""
    with credit:
        return _undecided(credit)
