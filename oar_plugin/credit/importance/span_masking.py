"""Span masking (counterfactual importance weighting, arXiv 2602.09331): how much the answer loses if a span is masked.

    I_span = log p(answer) - log p(answer, span masked)        I_t = I_span / number of tokens in the span

with the setting `probe=answer_joint`, which makes it the drop per answer token; with the other probes it is the KL of `oar_p`.
At most ten copies per response: ten spans of equal length, if it has more than 81 reasoning tokens. A shorter one has spans of
eight tokens (of one token, if it has at most ten), and what is left of the ten copies goes to single tokens of the spans with
the largest drop. For spans of one length: `perturbation.span=20 perturbation.budget=1`.

What differs from the paper:

* It masks equations and sentences, which it finds in the text. Here spans are cut by number of tokens, and cover all of the
  reasoning. An importance sees no text.
* A span without which the answer is *more* likely, a distractor, has importance 0, like a span that does not matter.
* The weights are those of the gate. The paper's map from importance to weights was not at hand.
"""

from oar_plugin.credit.importance.base import Copies
from oar_plugin.credit.importance.oar_p import OarP


class SpanMasking(OarP):
    name = "span_masking"
    help = (
        "Drop of the answer's log-probability (probe=answer_joint) when a span of tokens is masked; at most ten copies."
    )
    copies = Copies(budget=10)
