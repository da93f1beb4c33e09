"""Responses in a terminal: tokens with a weight above 1 are bold, below 1 dim; without styles, above 1 is in [[ ]]."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
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
            console.print(_tokens(response, marks=console.color_system is None), end="\n\n")
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
    numbers = (Column(title, justify="right") for title in ("how many", "mean weight"))
    table = Table("reasoning tokens", *numbers, box=SIMPLE_HEAD, show_edge=False)
    for kind in KINDS:
        if own := weights[kind]:
            table.add_row(kind, str(len(own)), f"{sum(own) / len(own):.2f}")
    return table


def _tokens(response: Response, marks: bool) -> Line:
    pairs = zip(response.tokens, response.weights or [1.0] * len(response.tokens), strict=True)
    line = Line()
    for style, run in groupby(pairs, lambda pair: "bold" if pair[1] > 1 else "dim" if pair[1] < 1 else ""):
        text = printable("".join(token for token, _ in run))
        line.append(f"[[{text}]]" if marks and style == "bold" else text, style)
    return line
