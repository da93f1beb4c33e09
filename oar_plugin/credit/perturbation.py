"""The masked copies of a response, and how their scores become importance (`importance=oar_p`).

A *unit* is the tokens that one copy replaces: up to `perturbation.span` consecutive ones, which share its score evenly.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from oar_plugin.credit.noise import gumbel, position_seeds, response_seeds
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

Unit: TypeAlias = tuple[int, ...]  # positions in the response that one copy replaces, ascending


def replacement_seeds(token_T: Tensor, position_R: Tensor, seed: int) -> Tensor:
    """Seeds of draws at positions of `token_T`, prompt and response to the answer's end, int64 `[R]`; `seed`: the step's."""
    seed_1 = response_seeds(token_T, torch.zeros_like(token_T), 1, seed)
    return position_seeds(seed_1.expand(len(position_R)), position_R)


def sample_replacements(
    logits_RV: Tensor, token_R: Tensor, seed_R: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY
) -> Tensor:
    """Draws a token per position from the logits that predict it, but never the replaced token `token_R`, int64 `[R]`."""
    # The Gumbel-max trick: the argmax of logits + Gumbel noise is a draw from their softmax.
    noisy_RV = logits_RV.float() + gumbel(seed_R, logits_RV.shape[-1], vocabulary.start)
    return vocabulary.argmax(vocabulary.without(noisy_RV, token_R))


def units(reasoning: Sequence[bool], span: int = 1) -> list[Unit]:
    """Cuts the true positions of `reasoning`, one per response token, into units of at most `span` consecutive tokens."""
    result: list[list[int]] = []
    for position, wanted in enumerate(reasoning):
        if wanted and result and len(result[-1]) < span and result[-1][-1] == position - 1:
            result[-1].append(position)
        elif wanted:
            result.append([position])
    return [tuple(unit) for unit in result]


def importance_of_units(unit_list: Sequence[Unit], scores: Sequence[float], length: int) -> Tensor:
    """Divides each unit's score evenly among its tokens, float32 `[L]`; 0 outside of units.

    A negative score (rounding, or a copy with a more likely answer) counts as 0: such a token has not helped the answer.
    """
    importance_L = torch.zeros(length, dtype=torch.float64)
    for unit, score in zip(unit_list, torch.tensor(scores, dtype=torch.float64).clamp_min(0.0).tolist(), strict=True):
        importance_L[list(unit)] = score / len(unit)  # NaN stays
    return importance_L.float()
