"""How commands print tables (nothing is cut off, in a narrow terminal or in a pipe) and progress."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from oar_plugin.output import printable


class _Console(Console):
    """Shows text as it is: names of runs and metrics are no markup, and steer no terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def console(**options: Any) -> Console:
    """As wide as the terminal, or as COLUMNS says; in a pipe or a file as wide as it takes, so that a row is a line."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(width=None if known else 10_000, markup=False, emoji=False, **options)


def table(*titles: str, **options: Any) -> Table:
    """One whose cells go on in the next line where they are too long."""
    made = Table(box=SIMPLE_HEAD, **options)
    for title in titles:
        made.add_column(title, overflow="fold")
    return made


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Told what is done, how many of it, and of how many; on stderr if that is a terminal, and gone at the end."""
    shown = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=printable(what), completed=done, total=total)
