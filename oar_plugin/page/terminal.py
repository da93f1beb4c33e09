"""Responses as plain text, for terminals and TensorBoard: tokens with a weight above 1 are in [[ ]]."""

from collections.abc import Sequence
from itertools import groupby

from oar_plugin.output import printable
from oar_plugin.page.record import PREDICTED, Response


def text_of(responses: Sequence[Response]) -> str:
    """Returns a block per response. Control characters are escaped."""
    return "".join(
        printable(f"{_head(response)}\n{response.prompt.strip()}\n{_tokens(response)}\n\n") for response in responses
    )


def _head(response: Response) -> str:
    numbers = {"advantage": response.advantage, "reward": response.reward}
    predicted = [name for name in response.importance if name.endswith(PREDICTED)]
    figures = [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
    truth = [] if response.truth is None else [f"truth {response.truth}"]
    head = [f"step {response.step}", response.group, response.uid, response.status, *predicted, *figures, *truth]
    return "  ".join(head)


def _tokens(response: Response) -> str:
    weights = response.weights or [1.0] * len(response.tokens)
    runs = groupby(zip(response.tokens, weights, strict=True), lambda pair: pair[1] > 1)
    texts = ((above, "".join(token for token, _ in run)) for above, run in runs)
    return "".join(f"[[{text}]]" if above else text for above, text in texts)
