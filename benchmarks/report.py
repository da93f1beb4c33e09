"""What a study found, as a page, as JSON, as a picture, and in the terminal; and how it says how far it is."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.machine import machine_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pages without pictures are made without it

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
"""Okabe and Ito's palette, for every figure."""

Progress = Callable[..., None]
"""Called as each piece of work begins: what it is, and where that is known how many pieces are done, and of how many."""


def silent(*_: object) -> None:
    """Progress that nobody sees."""


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
    """One finished study."""

    title: str
    stem: str  # of the files' names
    tables: Sequence[Table]  # the result, most important first
    notes: Sequence[str]  # what a reader must know before quoting a figure; Markdown, one point each
    runs: dict[str, Any]  # every single run that was measured; goes into the JSON as it is
    figure: "Callable[[], Figure] | None" = None  # draws the plot; None where there is nothing to see
    extra: dict[str, str] = field(default_factory=dict)  # further files, text by ending (`html`)
    failed: bool = False  # whether a part could not be measured: the exit status is then 1
    # What `describe_machine` does not know or says otherwise here; None where the machine is not known.
    machine: dict[str, Any] | None = field(default_factory=dict)
    command: str = ""  # that makes the page again. The command line fills it in, and the rest of `machine`.

    def show(self, console: Console) -> None:
        for table in self.tables:
            console.print(table.rich())
        for note in self.notes:
            console.print(f"- {note}", markup=False, highlight=False)

    def markdown(self, picture: str | None) -> str:
        lines = [f"# {self.title}", "", f"Made by `{self.command}`.", ""]
        lines += [machine_line(self.machine), ""] if self.machine else []
        for table in self.tables:
            lines += table.markdown()
        lines += [f"![{self.title}]({picture})", ""] if picture else []
        return "\n".join([*lines, "## How to read it", "", *(f"- {note}" for note in self.notes), ""])

    def to_json(self) -> str:
        tables = {t.title: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in self.tables}
        content = {"command": self.command, "machine": self.machine, "tables": tables, "notes": list(self.notes)}
        return _lined(content | {"runs": self.runs}) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Write `<stem>.md`, `.json`, `.png` and the extra files; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        picture = None
        if self.figure is not None:
            picture = f"{self.stem}.png"
            write_picture(self.figure(), folder / picture)
        texts = {"md": self.markdown(picture), "json": self.to_json(), **self.extra}
        for ending, text in texts.items():
            (folder / f"{self.stem}.{ending}").write_text(text, encoding="utf-8")
        return [folder / f"{self.stem}.{ending}" for ending in [*texts, *(["png"] if picture else [])]]


def subplots(*shape: int, **options: Any) -> "tuple[Figure, Any]":
    """A figure and its panels, with what all of ours have in common. Nothing needs a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=options.pop("figsize", (8, 4.6)), layout="constrained")
    panels = figure.subplots(*shape, **options)
    for panel in getattr(panels, "flat", [panels]):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    return figure, panels


def write_picture(figure: "Figure", file: Path) -> None:
    """As a PNG of 256 colours, which takes less than half of the bytes: lines and text need no more."""
    from PIL import Image

    with BytesIO() as drawn:
        figure.savefig(drawn, dpi=140)
        Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def _lined(value: Any) -> str:
    """JSON with a line for each element of a list: there may be hundreds, with dozens of numbers each."""
    if isinstance(value, Mapping):
        return "{" + ",\n".join(f"{json.dumps(str(name))}: {_lined(one)}" for name, one in value.items()) + "}"
    if not isinstance(value, list) or not value or isinstance(value[0], str | float | int):
        return json.dumps(value, default=_plain)
    return "[\n" + ",\n".join(json.dumps(one, default=_plain, separators=(",", ":")) for one in value) + "\n]"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # of numpy, pandas and torch; a path
