"""The Fisher norm: how far a token's embedding moves the answer's distribution, over all directions.

With the probe's distribution `p` and a random sign vector `u` (each row of AS-Joint has its own),

    c = sqrt(p) u - p <sqrt(p), u>        J = sum_v c_v z_v        I_t = ||dJ / de_t||^2

The expectation of `I_t` is the trace of token `t`'s block of the answer's Fisher information. Not in the paper. It agrees with
exact OAR-P better than OAR-G does, and needs no noise, which bf16 rounding can hide
(`benchmarks/results/fidelity_smollm2_cpu.md`).
"""

from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Importance, Rows, squared_norm
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard


class Fisher(Importance):
    name = "fisher"
    help = "Squared gradient norm of a random root of the answer's Fisher information; one backward, no noise."
    backwards = (Backward("probe"),)

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        return fisher_coefficients(rows.logits_NV, rows.signs(), rows.vocabulary)

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return squared_norm(gradient)


def fisher_coefficients(logits_NV: Tensor, sign_NV: Tensor, vocabulary: VocabularyShard = WHOLE_VOCABULARY) -> Tensor:
    """`sqrt(p) u - p <sqrt(p), u>` for `p = softmax(logits)`: a random root of the softmax's Fisher matrix, `[N, V]`."""
    p_NV = vocabulary.softmax(logits_NV)
    root_NV = p_NV.sqrt().mul_(sign_NV)
    return root_NV.sub_(p_NV.mul_(vocabulary.total(root_NV.sum(-1, keepdim=True))))
