"""Outcome probes (arXiv 2601.07408): from the logits at the answer's positions to the model's answer distribution.

With the rows of logits `z_{a_j - 1}`, which predict the answer's tokens `a_1 .. a_m`, the outcome is
* `last` (LT-Logits): the softmax of the first row alone;
* `answer_mean` (AS-Mean): the softmax of the *mean of the rows* (the answer teacher-forced);
* `answer_joint` (AS-Joint): the scalar mean over rows of `log p(a_j)`. It alone keeps every row; the others pool them.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Probe = Literal["last", "answer_mean", "answer_joint"]
PROBES: tuple[Probe, ...] = get_args(Probe)


class AnswerRows:
    """The rows of logits that a probe uses in a packed micro-batch. A sequence-parallel rank has only those that it holds.

    Args:
        table_5N: int64, one tensor, which one copy takes to the device. Its rows:
            `position_N`: packed position of the row, one before the answer token;
            `response_N`: index of the row's response in `[0, num_responses)`;
            `ordinal_N`: place of the row in its answer, from 0;
            `token_N`: the answer token that the row predicts;
            and the number of rows that the probe uses in the row's response, over all ranks, the inverse of `share_N`.
        num_responses: of the micro-batch, with or without an answer.
    """

    def __init__(self, table_5N: Tensor, num_responses: int) -> None:
        self.table_5N, self.num_responses = table_5N, num_responses
        self.position_N, self.response_N, self.ordinal_N, self.token_N, count_N = table_5N
        self.share_N = 1.0 / count_N.float()

    def __len__(self) -> int:
        return self.table_5N.shape[1]

    def select(self, keep_N: Tensor | slice) -> "AnswerRows":
        """The rows that `keep_N`, a bool tensor or a slice, selects. Shares do not change."""
        return AnswerRows(self.table_5N[:, keep_N], self.num_responses)


def answer_rows(answer_T: Tensor, response_T: Tensor, token_T: Tensor, num_responses: int, probe: Probe) -> AnswerRows:
    """Finds the rows that a probe uses in a packed batch on the CPU, and returns them in packed order.

    `answer_T` (bool) is true at the answer tokens of responses to score; `response_T` (int64) has each token's response. The
    probe `last` uses only the first row of each response. The first token of a sequence has no row that predicts it.
    """
    at_N = answer_T.nonzero()[:, 0]
    at_N = at_N[at_N > 0]
    at_N = at_N[response_T[at_N - 1] == response_T[at_N]]
    of_N = response_T[at_N]
    count_B = of_N.bincount(minlength=num_responses)
    ordinal_N = torch.arange(len(at_N)) - (count_B.cumsum(0) - count_B)[of_N]
    if probe == "last":
        first_N = ordinal_N == 0
        at_N, of_N, ordinal_N, count_B = at_N[first_N], of_N[first_N], ordinal_N[first_N], count_B.clamp_max(1)
    return AnswerRows(torch.stack([at_N - 1, of_N, ordinal_N, token_T[at_N], count_B[of_N]]), num_responses)


def pool(logits_NV: Tensor, rows: AnswerRows) -> Tensor:
    """Mean logits per response, `[B, V]`, float32 or better, differentiable; a sequence-parallel rank gets its part of the sum.

    A row that is not finite makes its response NaN and does not change the others.
    """
    # A matmul, unlike index_add, is deterministic on CUDA, and it is several times faster. Never in half precision.
    with torch.autocast(logits_NV.device.type, enabled=False):
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        share_BN = logits_NV.new_zeros(rows.num_responses, len(rows))
        share_BN[rows.response_N, torch.arange(len(rows), device=share_BN.device)] = rows.share_N.to(share_BN.dtype)
        # The product adds 0 times the rows of other responses, which would be NaN for infinite ones.
        finite_N = logits_NV.isfinite().all(-1)
        pooled_BV = share_BN @ logits_NV.where(finite_N[:, None], 0.0)
        return pooled_BV.masked_fill_(((share_BN > 0) & ~finite_N).any(-1)[:, None], torch.nan)
