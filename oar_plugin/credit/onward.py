"""Importance for chains of reasoning: how much a token moves the answer *and everything that comes before the answer*.

With the later steps teacher-forced, the answer of a chain (each step goes on from the last result) no longer depends on early
results, so importance that reads only the answer's rows pays the last step and treats the others like filler. Here the rows of
the reasoning count as well: an early result moves the predictions of the step that continues it. Two things make that work:

* the answer's rows keep most of the weight, `ANSWER_WEIGHT` times that of all others together, so that where the answer reads
  every result directly little is lost against the plain Fisher norm;
* predictions are flattened by `TEMPERATURE` first. A copy is predicted with near certainty, and the Fisher information of a
  sure prediction is near zero however much it would change with what it copies.

    J = sum_s sqrt(w_s) c_s . z_s,    I_t = ||dJ / de_t||^2

over the rows `s` that predict reasoning and answer, `c_s` a random root of the Fisher matrix of `softmax(z_s / T)`
(`oar_plugin.credit.gradient.fisher_coefficients`) with signs of its own. Its expectation is
`sum_s w_s tr(block of token t in the Fisher information of row s)`. Not in the paper.

Cost: one backward, as the Fisher norm; but every response row is projected to the vocabulary with a gradient. That needs no
graph over the logits: `dJ/dh_s = sqrt(w_s) W^T c_s` can be computed from the logits a chunk of rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oar_plugin.credit.gradient import fisher_coefficients
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

TEMPERATURE = 4.0
ANSWER_WEIGHT = 4.0


def onward_weights(
    reasoning_T: Tensor, answer_T: Tensor, response_T: Tensor, num_responses: int, answer_weight: float = ANSWER_WEIGHT
) -> Tensor:
    """Weight of the row that predicts each packed token, float32 `[T]`, 0 where it does not count.

    Args:
        reasoning_T: bool `[T]`, reasoning tokens.
        answer_T: bool `[T]`, answer tokens.
        response_T: int64 `[T]`, the response of each packed position.
        num_responses: how many there are.
        answer_weight: of a response's answer, in units of the weight of its reasoning.
    """

    def count(keep_T: Tensor) -> Tensor:
        zero_B = torch.zeros(num_responses, device=keep_T.device)
        return zero_B.index_add(0, response_T, keep_T.float())[response_T]

    share_T = answer_weight * count(reasoning_T) / count(answer_T).clamp_min(1)
    return torch.where(answer_T, share_T, reasoning_T.float())


def onward_coefficients(
    logits_NV: Tensor,
    weight_N: Tensor,
    sign_NV: Tensor,
    temperature: float = TEMPERATURE,
    vocabulary: VocabularyShard = WHOLE_VOCABULARY,
) -> Tensor:
    """What the logits of each row are multiplied by in `J`, `[N, V]`.

    Args:
        logits_NV: rows, without a graph.
        weight_N: of each row, not negative.
        sign_NV: +1 and -1, independent between rows.
        temperature: of the distributions whose Fisher information is taken; 1 for the policy's own.
        vocabulary: the columns that this process holds.
    """
    return weight_N.sqrt()[:, None] * fisher_coefficients(logits_NV / temperature, sign_NV, vocabulary)
