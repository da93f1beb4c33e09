"""What the commands of `oar bench` share: a progress bar, how results and errors are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[..., None]]:
    """A bar, and what to call as each of `total` pieces of work begins; with `begins=False` only the text changes."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressBar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def progress(what: str, begins: bool = True) -> None:
            nonlocal begun
            bar.update(task, description=what, advance=1 if begun and begins else 0)
            begun = begun or begins

        yield progress


def complain(command: str, error: Exception, status: int) -> int:
    """Say what went wrong with `oar bench COMMAND`; returns `status`."""
    from rich.console import Console

    Console(stderr=True).print(f"oar bench {command}: {error}", style="red", markup=False, highlight=False)
    return status


def write_report(
    console: Console,
    folder: Path,
    stem: str,
    markdown: Callable[[str | None], str],
    others: Mapping[str, str],
    draw: Callable[[Path], bool] | None = None,
) -> None:
    """Write a report and say where.

    Args:
        console: for the names.
        folder: made when it is not there.
        stem: of the files' names.
        markdown: the page, given the name of the plot, or None where there is none.
        others: further files, text by ending.
        draw: draws a plot into a file; False when it cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plot = f"{stem}.png" if draw is not None and draw(folder / f"{stem}.png") else None
    texts = {"md": markdown(plot), **others}
    for ending, text in texts.items():
        (folder / f"{stem}.{ending}").write_text(text)
    written = [*(f"{stem}.{ending}" for ending in texts), *([plot] if plot else [])]
    console.print(f"written: {', '.join(str(folder / name) for name in written)}", markup=False)


def measure_and_report(
    command: str,
    settings: Any,
    total: Callable[[Any], int],
    measure: Callable[[Any, Callable[[str], None]], Any],
    report: ModuleType,
    stem: Callable[[Any], str],
    out: Path | None,
) -> int:
    """Check, measure behind a progress bar, print, and write the report if asked for.

    Args:
        command: of `oar bench`, for messages.
        settings: with a `check`.
        total: pieces of work that `measure` will announce.
        measure: the measurement.
        report: module with `tables`, `notes`, `markdown`, `to_json` and `draw` of a result.
        stem: of the files' names, from the result.
        out: folder of the report; None for none.

    Returns:
        0, 1 when the measurement fails, 2 for settings that cannot work.
    """
    from rich.console import Console

    console = Console()
    try:
        settings.check()
        with progress_bar(console, total(settings)) as progress:
            result = measure(settings, progress)
    except ValueError as error:
        return complain(command, error, 2)
    except RuntimeError as error:
        return complain(command, error, 1)
    for table in report.tables(result):
        console.print(table)
    print_notes(console, report.notes(result))
    if out is not None:
        write_report(
            console,
            out,
            stem(result),
            lambda plot: report.markdown(result, plot),
            {"json": report.to_json(result) + "\n"},
            lambda file: report.draw(file, result),
        )
    return 0


def print_notes(console: Console, notes: list[str]) -> None:
    """A line each."""
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False)
