"""GRAIL's gradient-activation saliency (Gradient-Reweighted Advantages, arXiv 2606.04889). One backward, no noise.

    J = -sum_j log p(a_j)        I_t = || dJ / de_t * e_t ||        (element by element, so that products cannot cancel)

`gate=z_score` is the paper's map from saliency to weights. The published code (github.com/declare-lab/grail) differs: token `t`
has the saliency of the input before it, the answer has the largest weight, 5, only responses that are not better than their
group are reweighted, `\\boxed{` and `}` are part of the answer, and `p` is at the sampling temperature. Here a token has its
own saliency, the answer has weight 1, all responses are reweighted, `answer_patterns` finds the answer, the temperature is 1.
`probe` has no effect, but that `last` uses the first token of the answer only.
"""

from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Importance, Rows
from oar_plugin.credit.importance.oar_g import joint_coefficients


class Grail(Importance):
    name = "grail"
    help = "GRAIL's saliency: norm of gradient times input of the answer's log-probability; one backward, no noise."
    backwards = (Backward("answer"),)
    arbitrary_scale = False

    def coefficients(self, number: int, rows: Rows) -> Tensor:
        assert rows.token_N is not None
        return joint_coefficients(rows.logits_NV, rows.token_N, rows.vocabulary)

    def score(self, gradient: Tensor, embedding: Tensor) -> Tensor:
        return (gradient.float() * embedding.float()).norm(dim=-1)
