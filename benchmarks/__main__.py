"""python -m benchmarks STUDY [--help]: measure on this machine, print what was found, write a page with --out DIR."""

from __future__ import annotations

import importlib
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from benchmarks.study import Progress

STUDIES = {
    "step": "what importance costs in a training step, beside the log-prob pass, the published code and the update",
    "run": "what OAR costs in whole runs of verl, GRPO's steps and OAR's in turn",
    "offload": "what masked copies (OAR-P) cost in the actor and on a vLLM engine",
    "scaling": "GRPO's and OAR's step over data, tensor, pipeline, sequence and context parallel sizes",
    "fidelity": "how well each importance agrees with exact OAR-P and with tokens that are known to be causal",
    "learning": "how fast small models learn with each importance, beside GRPO, random credit and an oracle",
}


def usage() -> str:
    lines = [__doc__ or "", "", *(f"  {name:<10}{summary}" for name, summary in STUDIES.items())]
    return "\n".join([*lines, "", "examples:", "  python -m benchmarks step --size 10m --responses 16 --rounds 3"])


def main(arguments: list[str]) -> int:
    """Returns 0, 1 where the measurement failed, 2 for arguments that cannot work."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in STUDIES:
        print(f"benchmarks: there is no study {name!r}; allowed: {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    study = importlib.import_module(f"benchmarks.{name}")
    settings = tyro.cli(study.Settings, prog=f"python -m benchmarks {name}", description=study.__doc__, args=rest)
    console = Console()
    try:
        with progress_bar(console) as progress:
            report = study.measure(settings, progress)
    except (ValueError, RuntimeError) as error:
        if not raised_here(error):
            raise
        Console(stderr=True).print(f"benchmarks {name}: {error}", style="red", markup=False, highlight=False)
        return 2 if isinstance(error, ValueError) else 1
    if isinstance(report, str):  # a study that was asked for a text only
        print(report)
        return 0
    report.command = shlex.join(["python", "-m", "benchmarks", *arguments])
    report.show(console)
    if settings.out is not None:
        for path in report.write(settings.out):
            console.print(f"written: {path}", markup=False, soft_wrap=True)
    return int(report.failed)


def raised_here(error: Exception) -> bool:
    """Whether a study says this itself. A fault inside of a library needs its traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).partition(".")[0] in ("benchmarks", "oar_plugin")


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(what: str, done: int | None = None, of: int | None = None) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield progress


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
