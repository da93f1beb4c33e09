"""Tables that are complete even in a narrow terminal or in a pipe."""

import os
import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from oar_plugin.output import printable


class _Console(Console):
    """Prints text as it is: a name of a run or metric is no markup, and steers no terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def console(**options: Any) -> Console:
    """Return a console as wide as the terminal or COLUMNS; in a pipe or a file it is wide enough for a row to be a line."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(width=None if known else 10_000, markup=False, emoji=False, **options)


def table(*titles: str) -> Table:
    """Return an empty table with these columns, which wraps long cells."""
    return Table(*(Column(title, overflow="fold") for title in titles), box=SIMPLE_HEAD, show_edge=False)
