"""Privileged contrast: how much more likely a token is after a prompt that shows the right answer. One extra forward.

    c_t = log p(y_t | prompt with the right answer) - log p(y_t | prompt)        I_t = min(max(0, sign(A) c_t), CLIP)

in nats, at the sampling temperature: weights change the size of advantages `A` and never their sign. From RLSD (arXiv
2604.03128) and SDPO (arXiv 2601.20802), where this log-ratio is the advantage. `contrast_own` is the idea of RLCSD (arXiv
2606.11709): its second prompt shows the response's own wrong answer, so that the change of style that any shown answer causes
cancels. Two extra forwards.

What differs from the papers: RLSD's weight is `(1 - lambda) + lambda clip(exp(sign(A) c_t), 1 - eps, 1 + eps)`, here the gate
makes weights that average 1. The prompt shows the final answer (`algorithm.oar.context.template`), not a worked solution.
RLCSD's wrong answer may be another response's; under `contrast_own` responses without a negative advantage fall back.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Importance, Parts, Shown

CLIP = 5.0
"""Nats. Under a gate that uses values, a single token would otherwise decide the weights of all others."""


class Contrast(Importance):
    name = "contrast"
    help = "RLSD's privileged contrast: what showing the right answer does to each token; one extra forward."
    contexts: ClassVar[tuple[Shown, ...]] = ("truth",)
    arbitrary_scale = False

    def combine(self, parts: Parts) -> Tensor:
        return torch.zeros_like(parts.reasoning_BL, dtype=torch.float32)  # only log-probs make it

    def contrast(self, log_prob_L: Mapping[Shown, Tensor], sign: int) -> Tensor:
        """The importance `[L]` of a response from its log-probs after prompts, and from the sign of its advantage, -1 or 1."""
        return (sign * (log_prob_L["truth"] - log_prob_L["own"])).clamp(0.0, CLIP)


class OwnContrast(Contrast):
    name = "contrast_own"
    help = "RLCSD's: the right answer shown against the response's own wrong answer shown; two extra forwards."
    contexts = ("truth", "own")

    def conflicts(self, settings: Mapping[str, Any]) -> Iterator[str]:
        patterns = settings["answer_patterns"]
        if not patterns or any(":" in pattern for pattern in patterns):
            yield f"answer_patterns={list(patterns)}: contrast_own has no time limit for your own; allowed: one or more names"
