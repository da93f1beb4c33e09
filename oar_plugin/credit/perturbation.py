"""Which masked copies of a response to run, and how their scores become importance (`importance=oar_p`, `hybrid`).

A *unit* is the tokens that one copy replaces: up to `span` consecutive ones, which share its score evenly. With a `budget` only
some units get a copy: those with the largest gradient score (`hybrid`), or, without a gradient, those of the blocks of eight
units that moved the answer most when replaced as a whole. Any other unit gets its gradient score (or its share of its block's
score) times the median ratio of exact to estimated scores, and at most the largest exact score, so that such units keep their
order. With a ratio of sums, a single token with most of the importance would set the scale of all units.
"""

import math
from collections.abc import Generator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from oar_plugin.credit.noise import gumbel, position_seeds, response_seeds

Unit: TypeAlias = tuple[int, ...]  # positions in the response that one copy replaces, ascending
BLOCK = 8


def replacement_seeds(token_T: Tensor, position_R: Tensor, seed: int) -> Tensor:
    """Seeds of draws at positions of `token_T`, prompt and response to the answer's end, int64 `[R]`; `seed`: the step's."""
    seed_1 = response_seeds(token_T, torch.zeros_like(token_T), 1, seed)
    return position_seeds(seed_1.expand(len(position_R)), position_R)


def sample_replacements(logits_RV: Tensor, token_R: Tensor, seed_R: Tensor) -> Tensor:
    """Draws a token per position from the logits that predict it, but never the replaced token `token_R`, int64 `[R]`."""
    # The Gumbel-max trick: the argmax of logits + Gumbel noise is a draw from their softmax.
    noisy_RV = logits_RV.float() + gumbel(seed_R, logits_RV.shape[-1])
    return noisy_RV.scatter(-1, token_R[:, None], -math.inf).argmax(-1)


def units(reasoning: Sequence[bool], span: int = 1) -> list[Unit]:
    """Cuts the true positions of `reasoning`, one per response token, into units of at most `span` consecutive tokens."""
    result: list[list[int]] = []
    for position, wanted in enumerate(reasoning):
        if wanted and result and len(result[-1]) < span and result[-1][-1] == position - 1:
            result[-1].append(position)
        elif wanted:
            result.append([position])
    return [tuple(unit) for unit in result]


def copies_of_budget(budget: float, num_units: int) -> int:
    """Number of copies, at least 1. A `budget` up to 1 is a share of the units, a larger one is a number of copies."""
    wanted = math.ceil(budget * num_units - 1e-9) if budget <= 1 else math.floor(budget)
    return max(1, min(wanted, num_units))


class Search:
    """The copies to run for one response, in rounds, and the importance that follows from their scores.

    Run the copies of `wanted` and `send` their scores, until `wanted` is empty. Then `importance` is set, float64 `[L]`.
    `unit_list` comes from `units` and is not empty. Copies of blocks count in the `budget`. `gradient_L` has a gradient score
    per response token, which chooses the units with a copy; if it is None, blocks choose.
    """

    def __init__(
        self, unit_list: Sequence[Unit], length: int, budget: float = 1.0, gradient_L: Sequence[float] | None = None
    ) -> None:
        self._rounds = _rounds(unit_list, length, copies_of_budget(budget, len(unit_list)), gradient_L)
        self.importance: Tensor | None = None
        self.wanted: list[Unit] = next(self._rounds)

    def send(self, scores: Sequence[float]) -> None:
        """Takes the scores of `wanted`, in the same order; NaN for a copy that failed."""
        try:
            self.wanted = self._rounds.send(scores)
        except StopIteration as stop:
            self.importance, self.wanted = stop.value, []


def _rounds(
    unit_list: Sequence[Unit], length: int, copies: int, gradient_L: Sequence[float] | None
) -> Generator[list[Unit], Sequence[float], Tensor]:
    if copies == len(unit_list):
        exact = yield list(unit_list)
        return _spread(unit_list, torch.tensor(exact, dtype=torch.float64), length)
    if gradient_L is not None:
        estimate_U = torch.tensor([sum(gradient_L[t] for t in unit) for unit in unit_list], dtype=torch.float64)
        chosen = estimate_U.argsort(descending=True, stable=True)[:copies]
    else:
        index_B = torch.arange(len(unit_list)).split(max(BLOCK, math.ceil(len(unit_list) / copies)))
        scores = yield [tuple(t for i in index for t in unit_list[i]) for index in index_B]
        share_B = [max(score, 0.0) / len(index) for score, index in zip(scores, index_B, strict=True)]
        estimate_U = torch.tensor(share_B, dtype=torch.float64).repeat_interleave(torch.tensor([*map(len, index_B)]))
        ranked = sorted(range(len(scores)), key=lambda b: -scores[b])
        chosen = torch.cat([index_B[b] for b in ranked])[: copies - len(index_B)].sort().values
    if len(chosen):
        exact = yield [unit_list[i] for i in chosen.tolist()]
        estimate_U = _fill(estimate_U, chosen, exact)
    return _spread(unit_list, estimate_U, length)


def _fill(estimate_U: Tensor, chosen: Tensor, exact: Sequence[float]) -> Tensor:
    """Exact scores of the chosen units, calibrated estimates of the others."""
    exact_C = torch.tensor(exact, dtype=torch.float64).clamp_min(0.0)
    ratio_C = exact_C / estimate_U[chosen]
    ratio_C = ratio_C[ratio_C.isfinite()]
    ratio = ratio_C.quantile(0.5) if len(ratio_C) else 0.0
    filled_U = (estimate_U * ratio).clamp_max(exact_C.max().item())
    filled_U[chosen] = exact_C
    return filled_U


def _spread(unit_list: Sequence[Unit], score_U: Tensor, length: int) -> Tensor:
    """Divides each unit's score evenly among its tokens, float64 `[L]`; 0 outside of units.

    A negative score (rounding, or a copy with a more likely answer) counts as 0: such a token has not helped the answer.
    """
    importance_L = torch.zeros(length, dtype=torch.float64)
    for unit, score in zip(unit_list, score_U.clamp_min(0.0).tolist(), strict=True):  # NaN stays
        importance_L[list(unit)] = score / len(unit)
    return importance_L
