"""Credit from outcomes: how far a token changes what hidden states say about the response's reward. Not in the paper.

    I_t = |V_t - V_(t-1)|        V_t = u . (h_t, h_t (1 - p_t), 1 - p_t, 1)

`h_t` is the last hidden state of token `t`, projected, `p_t` the token's probability. The ridge regression `u` is fitted on
earlier steps: which sign had the advantage of the response (`oar_plugin.passes.prediction`). No backward, no copies.
"""

from oar_plugin.credit.importance.base import Importance


class Value(Importance):
    name = "value"
    help = "How far a token changes a value that is learned from the rewards of earlier steps; no backward."
    learns = True
