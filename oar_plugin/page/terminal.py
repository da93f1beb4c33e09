"""Responses as plain text, for terminals and TensorBoard: tokens with a weight above 1 are in [[ ]]."""

from collections.abc import Sequence
from itertools import groupby

from oar_plugin.output import printable
from oar_plugin.page.record import PREDICTED, Response


def text_of(responses: Sequence[Response]) -> str:
    """Returns a block per response. Control characters are escaped."""
    blocks = []
    for response in responses:
        numbers = {"advantage": response.advantage, "reward": response.reward}
        head = [f"step {response.step}", response.group, response.uid, response.status]
        head += [name for name in response.importance if name.endswith(PREDICTED)]
        head += [f"no {name}" if value is None else f"{name} {value:.4g}" for name, value in numbers.items()]
        head += ["no truth" if response.truth is None else f"truth {response.truth}"]
        pairs = zip(response.tokens, response.weights or [1.0] * len(response.tokens), strict=True)
        runs = groupby(pairs, lambda pair: pair[1] > 1)
        texts = [("[[{}]]" if above else "{}").format("".join(token for token, _ in run)) for above, run in runs]
        blocks += ["  ".join(head), response.prompt.strip(), "".join(texts), ""]
    return "".join(f"{printable(block)}\n" for block in blocks)
