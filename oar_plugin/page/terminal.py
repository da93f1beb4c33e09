"""Responses in a terminal: tokens with a weight above 1 are bold, below 1 dim; without styles, above 1 is in [[ ]]."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from oar_plugin.credit.answer import Segment
from oar_plugin.output import printable
from oar_plugin.page.inspector import KINDS, kind_of
from oar_plugin.page.record import PREDICTED, Header, Response


def json_of(responses: Sequence[Response], header: Header) -> str:
    """Returns one JSON object, with null for NaN and infinity, which JSON does not have."""
    document = json.dumps({"header": vars(header), "responses": list(map(vars, responses))})
    return json.dumps(json.loads(document, parse_constant=lambda _: None)) + "\n"


def text_of(responses: Sequence[Response], console: Console) -> str:
    """Returns a block per response and a table of mean weights by kind of scored reasoning token, as `console` prints them."""
    with console.capture() as capture:
        for response in responses:
            numbers = {"advantage": response.advantage, "reward": response.reward}
            figures = "".join(f"  {name} {value:.4g}" for name, value in numbers.items() if value is not None)
            figures += "" if response.truth is None else f"  truth {response.truth}"
            scores = "".join(f"  {name}" for name in response.importance if name.endswith(PREDICTED))
            head = f"step {response.step}  {response.group}  {response.uid}  {response.status}{scores}{figures}"
            console.print(Line(printable(head), "bold"))
            console.print(Line(printable(response.prompt.strip()), "dim"))
            tokens = Line(_marked(response)) if console.color_system is None else Line.assemble(*_styled(response))
            console.print(tokens, end="\n\n")
        if (table := _kinds(responses)).row_count:
            console.print(table)
    return capture.get()


def _kinds(responses: Sequence[Response]) -> Table:
    weights: dict[str, list[float]] = defaultdict(list)
    for response in responses:
        if response.status != "scored" or response.weights is None:
            continue
        for token, weight, segment in zip(response.tokens, response.weights, response.segments, strict=True):
            if segment == Segment.REASONING:
                weights[kind_of(token)].append(weight)
    table = Table("reasoning tokens", box=SIMPLE_HEAD, show_edge=False)
    for title in ("how many", "mean weight"):
        table.add_column(title, justify="right")
    for kind in KINDS:
        if own := weights[kind]:
            table.add_row(kind, str(len(own)), f"{sum(own) / len(own):.2f}")
    return table


def _styled(response: Response) -> Iterator[tuple[str, str]]:
    for token, weight in zip(response.tokens, response.weights or [1.0] * len(response.tokens), strict=True):
        yield printable(token), "bold" if weight > 1 else "dim" if weight < 1 else ""


def _marked(response: Response) -> str:
    pairs = zip(response.tokens, response.weights or [1.0] * len(response.tokens), strict=True)
    runs = [(more, "".join(token for token, _ in run)) for more, run in groupby(pairs, lambda pair: pair[1] > 1)]
    return "".join(f"[[{printable(run)}]]" if more else printable(run) for more, run in runs)
