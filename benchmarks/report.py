"""What a study found, as a page, as JSON, as a picture, and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.machine import machine_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
"""Okabe and Ito's palette, for every figure."""


@dataclass(frozen=True)
class Table:
    """Cells are Markdown, in which a bar stands for itself. The first column is text, the others are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        lines = [f"## {self.title}", "", f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        rows = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in self.rows)
        return [*lines, *(f"| {row} |" for row in rows), ""]

    def rich(self) -> RichTable:
        shown = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for place, column in enumerate(self.columns):
            prose = max((len(row[place]) for row in self.rows), default=0) > 24
            # Figures wrap where the terminal is narrow; cut off they would say something else.
            side: Literal["left", "right"] = "right" if place and not prose else "left"
            shown.add_column(column, justify=side, no_wrap=not (place or prose), overflow="fold")
        for row in self.rows:
            shown.add_row(*(cell.replace("`", "").replace("**", "") for cell in row))
        return shown


@dataclass
class Report:
    """One finished study.

    Attributes:
        title: of the page.
        stem: of the files' names.
        command: that makes the page again.
        machine: from `describe_machine`; empty where it is not known.
        tables: the result, most important first.
        notes: what a reader must know before quoting a figure; Markdown, one point each.
        runs: everything that was measured, every single run of it; goes into the JSON as it is.
        figure: draws the plot; None where there is nothing to see.
    """

    title: str
    stem: str
    command: str
    machine: dict[str, Any]
    tables: Sequence[Table]
    notes: Sequence[str]
    runs: dict[str, Any]
    figure: Callable[[], Figure] | None = None
    extra: dict[str, str] = field(default_factory=dict)
    """Further files, text by ending (`html`, `csv`)."""
    failed: bool = False
    """Whether a part could not be measured: the exit status is then 1."""

    def show(self, console: Console) -> None:
        """Print the tables and the notes."""
        for table in self.tables:
            console.print(table.rich())
        for note in self.notes:
            console.print(f"- {note}", markup=False, highlight=False)

    def markdown(self, picture: str | None) -> str:
        lines = [f"# {self.title}", "", f"Made by `{self.command}`.", ""]
        if self.machine:  # not known of runs that were kept
            lines += [machine_line(self.machine), ""]
        for table in self.tables:
            lines += table.markdown()
        if picture is not None:
            lines += [f"![{self.title}]({picture})", ""]
        return "\n".join([*lines, "## How to read it", "", *(f"- {note}" for note in self.notes), ""])

    def to_json(self) -> str:
        tables = {t.title: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in self.tables}
        content = {"command": self.command, "machine": self.machine, "tables": tables, "notes": list(self.notes)}
        return json.dumps({**content, "runs": self.runs}, indent=1, default=_plain) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Write `<stem>.md`, `.json`, `.png` and the extra files; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        picture = None
        texts = {"json": self.to_json(), **self.extra}
        if self.figure is not None:
            picture = folder / f"{self.stem}.png"
            figure = self.figure()
            figure.savefig(picture, dpi=140)
            figure.clear()
        texts["md"] = self.markdown(picture.name if picture else None)
        for ending, text in texts.items():
            (folder / f"{self.stem}.{ending}").write_text(text, encoding="utf-8")
        return [*(folder / f"{self.stem}.{ending}" for ending in sorted(texts)), *([picture] if picture else [])]


def subplots(*shape: int, **options: Any) -> tuple[Figure, Any]:
    """A figure and its panels, with what all of ours have in common. Nothing needs a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=options.pop("figsize", (8, 4.6)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(*shape, **options)
    for panel in getattr(panels, "flat", [panels]):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    return figure, panels


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # of numpy, pandas and torch
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a JSON file")
