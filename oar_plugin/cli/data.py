"""`oar data`: the files that recipes train on and validate with."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from oar_plugin.cli.arguments import positive
from oar_plugin.math.sources import SOURCES

_HELP = """\
Make the parquet files that the recipes read: DIR/NAME/train.parquet and DIR/NAME/test.parquet, in verl's columns, each prompt
with the instruction to box the final answer.

Data sets:
"""
_EXAMPLES = """\
examples:
  oar data gsm8k math math500                                 for recipes with recipe/data: gsm8k_math
  oar data deepmath aime24 aime25 amc23 math500 --decontaminate    for recipes with recipe/data: deepmath
  oar data gsm8k --limit 64 --out /tmp/small                  a few rows to try something
  oar data deepmath --from /data/DeepMath-103K                from a copy of the hub's repository, without network

Run it once, on storage that all nodes see, or on each node. Recipes look in OAR_DATA, or ~/data/oar without it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = (f"  {name:9} {' and '.join(source.splits):15} {source.hub_id}" for name, source in SOURCES.items())
    parser.description, parser.epilog = _HELP + "\n".join(lines), _EXAMPLES
    parser.add_argument("names", nargs="+", choices=sorted(SOURCES), metavar="NAME", help="data sets, see above")
    default = Path(os.environ.get("OAR_DATA") or Path.home() / "data" / "oar")
    text = "where to write (default: OAR_DATA, or ~/data/oar without it)"
    parser.add_argument("--out", type=Path, default=default, metavar="DIR", help=text)
    text = (
        "a copy instead of the hub: a folder with its repository or with train and test files, or a .parquet, .json or "
    )
    text += ".jsonl file. For several data sets a folder with one for each, by name"
    parser.add_argument("--from", dest="local", type=Path, metavar="PATH", help=text)
    text = "the first N rows of each split (default: all)"
    parser.add_argument("--limit", type=positive, metavar="N", help=text)
    text = "drop training rows whose problem (letters and digits, regardless of case) is in a test.parquet of DIR; without it "
    text += "they are counted. DeepMath's authors did so by meaning, against far more benchmarks (arXiv 2504.11456)"
    parser.add_argument("--decontaminate", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """1 when something cannot be had; the message says what to do."""
    missing = [name for name in ("datasets", "math_verify", "pebble") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"oar data: {', '.join(missing)} not installed: pip install '.[recipes]' in a checkout", file=sys.stderr)
        return 1

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    from oar_plugin.math.prepare import DataError, prepare

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("load", total=None)

            def progress(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            prepared = prepare(args.names, args.out, args.local, args.limit, args.decontaminate, progress)
    except DataError as error:
        print(f"oar data: {error}", file=sys.stderr)
        return 1
    table = Table("data set", "split", "rows", "dropped", "longest prompt (characters)")
    for part in prepared:
        dropped = ", ".join(f"{count} {reason}" for reason, count in part.dropped.items()) or "0"
        table.add_row(part.name, part.split, str(part.rows), dropped, str(part.longest_prompt))
    console.print(table)
    for part in prepared:
        if part.in_evaluation and not args.decontaminate:
            print(
                f"{part.name}: {part.in_evaluation} training rows are also in an evaluation set: --decontaminate drops them"
            )
        if part.unreadable:
            shown = ", ".join(map(repr, part.unreadable[:5])) + (", ..." if part.unreadable[5:] else "")
            print(
                f"{part.name} ({part.split}): {len(part.unreadable)} answers that math-verify cannot read as "
                f"mathematics; a response is paid when it has the same text: {shown}"
            )
    console.print(f"written to {args.out}", markup=False, highlight=False, soft_wrap=True)
    return 0
