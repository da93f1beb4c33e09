"""GRAIL's gradient-activation saliency (Gradient-Reweighted Advantages, arXiv 2606.04889). One backward, no noise.

    J = -sum_j log p(a_j)        I_t = || dJ / de_t * e_t ||

with the product element by element: `oar_g` sums the products first, so that they can cancel. The gate `z_score` is the
paper's map from saliency to weights: `importance=grail gate=z_score`.

What differs from the published code (github.com/declare-lab/grail), from which the formulas are taken:

* The code gives token `t` the saliency of the input before it, token `t - 1`. Here a token has its own.
* It gives the answer itself the largest weight, 5, even in responses whose other weights are 1. Here the answer has weight 1.
* Its configuration reweights only responses that are not better than their group. Here all responses are.
* It takes `\\boxed{` and `}` as part of the answer, and `p` at the sampling temperature. Here the answer is what
  `answer_patterns` finds, and the temperature is 1.

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
