"""How commands print tables: nothing is cut off, in a narrow terminal or in a pipe."""

import os
import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def console(**options: Any) -> Console:
    """As wide as the terminal, or as COLUMNS says; in a pipe or a file as wide as it takes, so that a row is a line."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else 10_000, **options)


def table(*titles: str, **options: Any) -> Table:
    """One whose cells go on in the next line where they are too long."""
    made = Table(box=SIMPLE_HEAD, **options)
    for title in titles:
        made.add_column(title, overflow="fold")
    return made
