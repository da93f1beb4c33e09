"""Counterfactual importance, OAR-P (arXiv 2601.07408): replace a token and see how far the answer distribution moves.

`I_t = KL(P || P^(t))`, with `P^(t)` the outcome when token `t` is replaced; for the probe `answer_joint` the drop of the
mean log-probability of the answer. Exact, and one forward a reasoning token. What is here says *which* copies to run and
what to make of their outcomes; running them is the host's business (`oar_plugin.hosts`).

A *unit* is what one copy replaces at once: a token, or with `span` a run of them, whose score is shared out evenly.
With a `budget` only some units get a copy of their own:

* `by_gradient`: those with the largest gradient score (one forward and backward; Fisher norm);
* `by_blocks`: blocks of eight units are replaced as a whole first, then the units of the blocks that moved the answer most,
  until the budget is used up. Needs no gradient, so an inference engine can do it.

The other units get an estimate on the same scale, nats: their gradient (or their share of their block's score) times the
median ratio of exact to estimated scores over the units that were run, and never more than the largest exact score. So the
gate sees one scale, and units that nobody looked at closely keep their order. The median, because one token often has most
of the importance: with a ratio of sums all others would be estimated as if they had its ratio.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from oar_plugin.credit.noise import gumbel, position_seeds, response_seeds
from oar_plugin.credit.probe import Probe

Replacement = Literal["pad", "mean", "sampled"]
REPLACEMENTS: tuple[Replacement, ...] = get_args(Replacement)

Unit: TypeAlias = tuple[int, ...]
"""Positions in the response, ascending, that one copy replaces at once."""

Search: TypeAlias = Generator[list[Unit], Sequence[float], Tensor]
"""Yields units to run, is sent their scores (NaN where one could not be had), returns importance, float64 `[L]`."""

BLOCK = 8


# ---- outcomes


def log_distribution(logits_KV: Tensor) -> Tensor:
    """`log softmax` of pooled probe logits in float64, `[K, V]`: in float32 a small KL is off by more than its size."""
    return logits_KV.double().log_softmax(-1)


def divergence(reference: Tensor, outcome_K: Tensor, probe: Probe) -> Tensor:
    """How far the outcome of each copy is from the reference, `[K]` float64.

    Args:
        reference: `[V]` log-distribution (`log_distribution`); for `answer_joint` the scalar mean log-probability.
        outcome_K: the same of each copy, `[K, V]` or `[K]`.
        probe: which of the two.

    Returns:
        `KL(reference || outcome)`, or `reference - outcome` for `answer_joint`, which is negative where the copy makes
        the answer *more* likely. Tokens that the reference gives no mass (banned ones) count nothing.
    """
    if probe == "answer_joint":
        return reference.double() - outcome_K.double()
    terms_KV = reference.exp() * (reference - outcome_K)
    return terms_KV.masked_fill(reference == -math.inf, 0.0).sum(-1)


def replacement_seeds(token_T: Tensor, position_R: Tensor, seed: int) -> Tensor:
    """Seeds of the draws at some positions, int64 `[R]`: the same for the same response, wherever it is scored.

    Args:
        token_T: int64 `[T]`, prompt and response up to the end of the answer.
        position_R: positions in it.
        seed: `algorithm.oar.seed`.
    """
    seed_1 = response_seeds(token_T, torch.zeros_like(token_T), 1, seed)
    return position_seeds(seed_1.expand(len(position_R)), position_R)


def sample_replacements(logits_RV: Tensor, token_R: Tensor, seed_R: Tensor) -> Tensor:
    """A token for each position from the model's own prediction there, never the one it replaces, int64 `[R]`.

    Args:
        logits_RV: the logits that predict each position.
        token_R: the tokens that stand there.
        seed_R: int64, from `replacement_seeds`.
    """
    # The Gumbel-max trick: the argmax of logits + Gumbel noise is a draw from their softmax.
    noisy_RV = logits_RV.float() + gumbel(seed_R, logits_RV.shape[-1])
    return noisy_RV.scatter(-1, token_R[:, None], -math.inf).argmax(-1)


# ---- units


def units(reasoning: Sequence[bool], span: int = 1, ends: Sequence[bool] | None = None) -> list[Unit]:
    """Cut a response's reasoning into units.

    Args:
        reasoning: one a response token.
        span: tokens a unit, at most; with `ends`, not used.
        ends: one a response token, true where a unit ends (a newline, an operator).

    Returns:
        Units in order. None holds a token that is not reasoning or bridges one: where something else stands between two
        reasoning tokens (tool output), a new unit begins.
    """
    found: list[Unit] = []
    current: list[int] = []
    for position, wanted in enumerate(reasoning):
        full = ends is None and len(current) == span
        if current and (full or current[-1] != position - 1 or (ends is not None and ends[current[-1]])):
            found.append(tuple(current))
            current = []
        if wanted:
            current.append(position)
    if current:
        found.append(tuple(current))
    return found


_OPERATORS = tuple(sign.encode() for sign in "+-*/=<>×÷·≤≥≠≈→")


def unit_ends(pieces: Sequence[bytes], where: Literal["lines", "operators"]) -> list[bool]:
    """Which tokens end a unit: those with a newline in them or, for `operators`, with an operator or a newline.

    Args:
        pieces: the bytes of each response token.
        where: which of the two.
    """
    marks = (b"\n",) if where == "lines" else (b"\n", *_OPERATORS)
    return [any(mark in piece for mark in marks) for piece in pieces]


def copies_of_budget(budget: float, num_units: int) -> int:
    """How many copies `budget` allows: up to 1 a share of the units, above that a number; at least one."""
    wanted = math.ceil(budget * num_units - 1e-9) if budget <= 1 else math.floor(budget)
    return max(1, min(wanted, num_units))


# ---- which units to run


def search(
    unit_list: Sequence[Unit], length: int, budget: float = 1.0, gradient_L: Sequence[float] | None = None
) -> Search:
    """The copies to run for one response, in rounds, and the importance that follows.

    Args:
        unit_list: from `units`, not empty.
        length: tokens of the response, L.
        budget: see `copies_of_budget`. Copies of blocks count.
        gradient_L: gradient score of each response token; without it a budget goes `by_blocks`.

    Returns:
        A generator; see `Search`. It takes one round for an exhaustive search or `by_gradient`, at most two `by_blocks`.
    """
    copies = copies_of_budget(budget, len(unit_list))
    if copies == len(unit_list):
        return _exhaustive(unit_list, length)
    if gradient_L is not None:
        return _by_gradient(unit_list, length, copies, gradient_L)
    return _by_blocks(unit_list, length, copies)


def rounds(budget: float, with_gradient: bool) -> int:
    """The most rounds that `search` takes: hosts that work in lock-step count on it."""
    return 1 if budget == 1 or with_gradient else 2


def _exhaustive(unit_list: Sequence[Unit], length: int) -> Search:
    exact = yield list(unit_list)
    return _spread(unit_list, torch.tensor(exact, dtype=torch.float64), length)


def _by_gradient(unit_list: Sequence[Unit], length: int, copies: int, gradient_L: Sequence[float]) -> Search:
    estimate_U = torch.tensor([sum(gradient_L[t] for t in unit) for unit in unit_list], dtype=torch.float64)
    chosen = estimate_U.argsort(descending=True, stable=True)[:copies].sort().values
    exact = yield [unit_list[i] for i in chosen.tolist()]
    return _spread(unit_list, _fill(estimate_U, chosen, exact), length)


def _by_blocks(unit_list: Sequence[Unit], length: int, copies: int) -> Search:
    size = max(BLOCK, math.ceil(len(unit_list) / copies))
    blocks = [list(range(i, min(i + size, len(unit_list)))) for i in range(0, len(unit_list), size)]
    scores = yield [tuple(t for i in block for t in unit_list[i]) for block in blocks]
    estimate_U = torch.empty(len(unit_list), dtype=torch.float64)
    for block, score in zip(blocks, scores, strict=True):
        estimate_U[block] = max(score, 0.0) / len(block) if score == score else math.nan
    left = copies - len(blocks)
    if left <= 0:
        return _spread(unit_list, estimate_U, length)
    ranked = sorted(range(len(blocks)), key=lambda b: -scores[b])
    chosen = torch.tensor(sorted([i for b in ranked for i in blocks[b]][:left]))
    exact = yield [unit_list[i] for i in chosen.tolist()]
    return _spread(unit_list, _fill(estimate_U, chosen, exact), length)


def _fill(estimate_U: Tensor, chosen: Tensor, exact: Sequence[float]) -> Tensor:
    """Exact scores where there are, calibrated estimates elsewhere."""
    exact_C = torch.tensor(exact, dtype=torch.float64).clamp_min(0.0)
    ratio_C = exact_C / estimate_U[chosen]
    ratio_C = ratio_C[ratio_C.isfinite()]
    ratio = ratio_C.quantile(0.5) if len(ratio_C) else 0.0
    filled_U = (estimate_U * ratio).clamp_max(exact_C.max().item())
    filled_U[chosen] = exact_C
    return filled_U


def _spread(unit_list: Sequence[Unit], score_U: Tensor, length: int) -> Tensor:
    """Scores of units to tokens: a unit's score is shared out evenly; 0 at tokens of no unit.

    A score below zero (a copy that makes the answer more likely, or rounding) counts as zero: the gate takes a logarithm,
    and a token that hurts the answer has not helped it.
    """
    importance_L = torch.zeros(length, dtype=torch.float64)
    for unit, score in zip(unit_list, score_U.tolist(), strict=True):
        importance_L[list(unit)] = (max(score, 0.0) if score == score else math.nan) / len(unit)
    return importance_L
