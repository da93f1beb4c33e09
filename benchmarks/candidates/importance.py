"""Importances that were tried for chains of reasoning, where the answer no longer depends on early results.

Each takes a `CreditPass` and returns `[B, L]`; `oar bench learning --method benchmarks.candidates.importance:NAME` trains
with it. `w[s]` stands for a weight of the distribution that token `s` was drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.bench.learning_credit import CreditPass


def _unit(importance_BL: Tensor, keep_BL: Tensor) -> Tensor:
    """Scaled so that the largest kept score of a response is 1, 0 elsewhere."""
    kept_BL = importance_BL * keep_BL
    return kept_BL / kept_BL.amax(-1, keepdim=True).clamp_min(1e-30)


def _share(importance_BL: Tensor, keep_BL: Tensor) -> Tensor:
    kept_BL = importance_BL * keep_BL
    return kept_BL / kept_BL.sum(-1, keepdim=True).clamp_min(1e-30)


def joint(credit: CreditPass) -> Tensor:
    """The Fisher norm of the answer's tokens, one backward."""
    with credit:
        return credit.fisher_norm(credit.rollout.answer_BL.float())


def future(credit: CreditPass) -> Tensor:
    """(a) Of all later tokens of the response, one backward."""
    r = credit.rollout
    with credit:
        return credit.fisher_norm((r.reasoning_BL | r.answer_BL).float())


def decided(credit: CreditPass) -> Tensor:
    """(e) Fisher norm of the answer times the entropy at the token."""
    with credit:
        return (
            _unit(credit.fisher_norm(credit.rollout.answer_BL.float()), credit.rollout.reasoning_BL) * credit.entropy_BL
        )


def future_decided(credit: CreditPass) -> Tensor:
    """(a) times entropy at the token."""
    r = credit.rollout
    with credit:
        return _unit(credit.fisher_norm((r.reasoning_BL | r.answer_BL).float()), r.reasoning_BL) * credit.entropy_BL


def _passed(credit: CreditPass, hops: int, decay: float, decide: bool, combine: str) -> Tensor:
    r = credit.rollout
    with credit:
        total = torch.zeros(r.token_BL.shape)
        weight = r.answer_BL.float()
        for hop in range(hops):
            found = _unit(credit.fisher_norm(weight), r.reasoning_BL)
            if decide:
                found = _unit(found * credit.entropy_BL, r.reasoning_BL)
            found = found * decay**hop
            total = torch.maximum(total, found) if combine == "max" else total + found
            weight = total if combine == "max" else found
        return total


def passed2(credit: CreditPass) -> Tensor:
    """(b) Two backwards: answer, then the tokens it found; the larger of both, each scaled to 1."""
    return _passed(credit, 2, 1.0, False, "max")


def passed4(credit: CreditPass) -> Tensor:
    return _passed(credit, 4, 1.0, False, "max")


def passed8(credit: CreditPass) -> Tensor:
    return _passed(credit, 8, 1.0, False, "max")


def passed2_decided(credit: CreditPass) -> Tensor:
    return _passed(credit, 2, 1.0, True, "max")


def passed4_decided(credit: CreditPass) -> Tensor:
    return _passed(credit, 4, 1.0, True, "max")


def power(credit: CreditPass) -> Tensor:
    """(c) Two backwards: (a), then rows weighted by it plus the answer."""
    r = credit.rollout
    keep = r.reasoning_BL
    with credit:
        first = _unit(credit.fisher_norm((keep | r.answer_BL).float()), keep)
        return credit.fisher_norm(first + r.answer_BL.float())


def power_decided(credit: CreditPass) -> Tensor:
    r = credit.rollout
    keep = r.reasoning_BL
    with credit:
        first = _unit(credit.fisher_norm((keep | r.answer_BL).float()) * credit.entropy_BL, keep)
        return _unit(credit.fisher_norm(first + r.answer_BL.float()), keep) * credit.entropy_BL


def log_decided(credit: CreditPass) -> Tensor:
    """(f) log1p-scaled geometric mean of (a) and the entropy."""
    r = credit.rollout
    with credit:
        return (
            _unit(credit.fisher_norm((r.reasoning_BL | r.answer_BL).float()), r.reasoning_BL) * credit.entropy_BL
        ).sqrt()


def sure_future(credit: CreditPass) -> Tensor:
    """(d) Fisher norm of all later rows, those of low entropy counting most: form, copies and results that follow, not filler."""
    r = credit.rollout
    with credit:
        sure = (-credit.entropy_BL).exp()
        return credit.fisher_norm(sure.square() * (r.reasoning_BL | r.answer_BL))


def sure_future_decided(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        sure = (-credit.entropy_BL).exp()
        return (
            _unit(credit.fisher_norm(sure.square() * (r.reasoning_BL | r.answer_BL)), r.reasoning_BL)
            * credit.entropy_BL
        )


def surprise_future(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        return _unit(credit.fisher_norm((r.reasoning_BL | r.answer_BL).float()), r.reasoning_BL) * (
            1 - credit.log_prob_BL.exp()
        )


def _sat(credit: CreditPass) -> Tensor:
    return 1 - (-credit.entropy_BL / 0.3).exp()


def _sure(credit: CreditPass) -> Tensor:
    return (-2 * credit.entropy_BL).exp() * credit.rollout.reasoning_BL


def sf_sat(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        return _unit(credit.fisher_norm(_sure(credit) + r.answer_BL), r.reasoning_BL) * _sat(credit)


def sf_ans(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        sure = _sure(credit)
        total = sure.sum(-1, keepdim=True) / 4
        return _unit(credit.fisher_norm(sure + r.answer_BL * total), r.reasoning_BL)


def sf_ans_sat(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        sure = _sure(credit)
        total = sure.sum(-1, keepdim=True) / 4
        return _unit(credit.fisher_norm(sure + r.answer_BL * total), r.reasoning_BL) * _sat(credit)


def two(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        return _unit(credit.fisher_norm(_sure(credit)), r.reasoning_BL) + _unit(
            credit.fisher_norm(r.answer_BL.float()), r.reasoning_BL
        )


def two_sat(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        return (
            _unit(credit.fisher_norm(_sure(credit)), r.reasoning_BL)
            + _unit(credit.fisher_norm(r.answer_BL.float()), r.reasoning_BL)
        ) * _sat(credit)


def fisher_sat(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        return _unit(credit.fisher_norm(r.answer_BL.float()), r.reasoning_BL) * _sat(credit)


def passed2_sure(credit: CreditPass) -> Tensor:
    r = credit.rollout
    with credit:
        one = _unit(credit.fisher_norm(r.answer_BL.float()), r.reasoning_BL)
        return one + _unit(credit.fisher_norm(one * _sure(credit)), r.reasoning_BL)


def sat(credit: CreditPass) -> Tensor:
    with credit:
        return _sat(credit)


def sure_only(credit: CreditPass) -> Tensor:
    """Low entropy at the token itself, no influence: a control."""
    with credit:
        return _sure(credit)
