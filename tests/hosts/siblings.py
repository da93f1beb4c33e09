"""Responses, rewards and looks that the tests of TRL's and ms-swift's trainers share."""

from typing import Any

import torch
from torch import Tensor

from oar_plugin.credit.importance import Parts
from tests.own_importance import Saliency

EVEN = "python:tests.hosts.siblings:Even"
PROMPTS = [" 3 + 4 =", " so 9 - 5 then 4 + 1 =", " 2 + 2 =", " well we add 1 + 6 ="]
SIBLINGS = [  # of each prompt; the second is paid, the last has no answer
    " 3 and 4 we see 7 #### 7<eos>",
    " so well then 5 #### 5 ok ok<eos>",
    " hmm let us add it now #### 1<eos>",
    " well well well<eos>",
]


class Even(Saliency):
    """A whole pass, and the same for all tokens: nothing to reshape."""

    name = "even"

    def combine(self, parts: Parts) -> Tensor:
        return torch.ones_like(parts.score_KBL[0])


def paid(text: str) -> float:
    """For the answer 5, and for `well`."""
    return float("5" in text) + 0.25 * text.count("well")


def same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]
