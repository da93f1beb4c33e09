"""Responses for a terminal: weights as colours, and as [[ ]] around what was paid more than 1 where there are no colours."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from oar_plugin.credit.answer import Segment
from oar_plugin.page.inspector import KINDS, kind_of
from oar_plugin.page.record import Response
from oar_plugin.page.shade import shade


def print_responses(responses: Sequence[Response], console: Console, table: Table) -> None:
    """A block each, and what each kind of reasoning token was paid, into an empty table."""
    coloured = console.color_system is not None
    for response in responses:
        numbers = {"advantage": response.advantage, "reward": response.reward}
        said = "".join(f"  {name} {value:.4g}" for name, value in numbers.items() if value is not None)
        said += "" if response.truth is None else f"  truth {response.truth}"
        head = f"step {response.step}  {response.group}  {response.uid}  {response.status}{said}"
        console.print(Line(_shown(head), "bold"))
        console.print(Line(_shown(response.prompt.strip()), "dim"))
        console.print(Line.assemble(*_coloured(response)) if coloured else Line(_marked(response)), end="\n\n")
    weights: dict[str, list[float]] = defaultdict(list)
    for response in responses:
        rows = zip(response.tokens, response.weights or (), response.segments, strict=response.weights is not None)
        for token, weight, segment in rows:
            if segment == Segment.REASONING:
                weights[kind_of(token)].append(weight)
    for title in ("reasoning tokens", "how many", "mean weight"):
        table.add_column(title, justify="left" if title == "reasoning tokens" else "right")
    for kind in KINDS:
        if paid := weights[kind]:
            table.add_row(kind, str(len(paid)), f"{sum(paid) / len(paid):.2f}")
    if table.row_count:
        console.print(table)


def _coloured(response: Response) -> Iterator[str | tuple[str, str]]:
    for place, token in enumerate(response.tokens):
        weight = 1.0 if response.weights is None else response.weights[place]
        yield _shown(token) if weight == 1 else (_shown(token), f"black on {shade(weight)}")


def _marked(response: Response) -> str:
    pairs = zip(response.tokens, response.weights or [1.0] * len(response.tokens), strict=True)
    runs = [(more, "".join(token for token, _ in run)) for more, run in groupby(pairs, lambda pair: pair[1] > 1)]
    return "".join(f"[[{_shown(run)}]]" if more else _shown(run) for more, run in runs)


def _shown(text: str) -> str:
    """What steers a terminal, or the direction of writing, as `\\x1b`."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
