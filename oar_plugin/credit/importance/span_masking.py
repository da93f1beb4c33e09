"""Span masking (counterfactual importance weighting, arXiv 2602.09331): how much the answer loses if a span is masked.

    I_span = log p(answer) - log p(answer, span masked)        I_t = I_span / number of tokens in the span

with `probe=answer_joint`, per answer token; with other probes the KL of `oar_p`. At most ten copies per response: ten equal
spans, or spans of eight tokens (of one, if at most ten), then single tokens of the spans with the largest drop. Spans of one
length: `perturbation.span=20 perturbation.budget=1`. What differs from the paper: it masks equations and sentences, here spans
are cut by number of tokens; a distractor has importance 0; weights are the gate's, as the paper's map was not at hand.
"""

from oar_plugin.credit.importance.base import Copies
from oar_plugin.credit.importance.oar_p import OarP


class SpanMasking(OarP):
    name = "span_masking"
    help = (
        "Drop of the answer's log-probability (probe=answer_joint) when a span of tokens is masked; at most ten copies."
    )
    copies = Copies(budget=10)
