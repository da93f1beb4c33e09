"""`oar data` makes the files that recipes use for training and validation."""

import argparse
import importlib.util
import sys
from pathlib import Path

from oar_plugin.cli.arguments import missing_package
from oar_plugin.output import did_you_mean, say
from oar_plugin.runs.math.sources import SOURCES, DataError, data_folder, prepare

_HELP = """\
Make the parquet files that the recipes read: DIR/NAME/train.parquet and DIR/NAME/test.parquet, in verl's columns, each prompt
with the instruction to box the final answer. Equal rows are kept once.

Data sets, with page on the hub and licence (as stated there). Read the licence before you use or share a set:
"""
_EXAMPLES = """\
examples:
  oar data gsm8k math math500                                 for recipes with recipe/data: gsm8k_math
  oar data deepmath aime24 aime25 amc23 math500 --decontaminate    for recipes with recipe/data: deepmath
  oar data math500 aime24 amc23 minerva olympiadbench         the default sets of oar eval
  oar data aime24 --repeat aime24=8                           verl's validation asks each problem 8 x val_kwargs.n times
  oar data deepmath --from /data/DeepMath-103K                from a copy of the hub's repository, without network

Run it once, on storage that all nodes see, or on each node. Recipes read OAR_DATA, or ~/data/oar if it is not set.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    first, second = max(map(len, SOURCES)), max(len(source.hub_id) for source in SOURCES.values())
    listed = (f"  {name:{first}}  {one.hub_id:{second}}  {one.licence}\n" for name, one in SOURCES.items())
    parser.description, parser.epilog = _HELP + "".join(listed), _EXAMPLES
    add = parser.add_argument
    add("names", nargs="*", type=_name, metavar="NAME", help="data sets, see above")
    text = "print the data sets: splits, page on the hub, licence, columns that are read"
    add("--list", action="store_true", help=text)
    text = "folder to write to (default: OAR_DATA, or ~/data/oar if OAR_DATA is not set)"
    add("--out", type=Path, default=data_folder(), metavar="DIR", help=text)
    text = "use a copy, not the hub: a folder with the hub's repository, or with train and test files (.parquet, "
    text += ".json, .jsonl). For several data sets: a folder that has one such folder per data set, with its name"
    add("--from", dest="local", type=Path, metavar="PATH", help=text)
    text = "drop training rows whose problem (letters and digits, regardless of case) is in a test.parquet of DIR; "
    text += "default: only count them. DeepMath's authors compared meanings, on far more benchmarks (arXiv 2504.11456)"
    add("--decontaminate", action="store_true", help=text)
    text = "write each row of a set's test file N times: verl's mean@n is then the mean over N x n responses (best@n "
    text += "and maj@n still use n responses); oar eval asks equal problems only once"
    add("--repeat", action="append", type=_repeat, default=[], metavar="NAME=N", help=text)


def _name(text: str) -> str:
    if text not in SOURCES:
        known = did_you_mean(text, SOURCES) or f"; there are {', '.join(SOURCES)}"
        raise argparse.ArgumentTypeError(f"{text}: no such data set{known}")
    return text


def _repeat(text: str) -> tuple[str, int]:
    name, _, times = text.partition("=")
    if not times.isdecimal() or int(times) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=N, N at least 1")
    return _name(name), int(times)


def run(args: argparse.Namespace) -> int:
    """Return 0; 1 if a package or a data set is missing; 2 for wrong input. The message says what to do."""
    from oar_plugin.cli.tables import console, table

    if args.list:
        listed = table("", "splits", "page on the hub", "licence", "columns")
        for name, source in SOURCES.items():
            page = source.hub_id + (f" ({source.config})" if source.config not in (None, "main", "default") else "")
            columns = f"{source.question}, {source.answer}"
            listed.add_row(name, ", ".join(source.splits), page, source.licence, columns)
        console().print(listed)
        return 0
    repeats = dict(args.repeat)
    absent = [name for name in repeats if name not in args.names or "test" not in SOURCES[name].splits]
    faults = [f"--repeat {name}: needs {name} among the names; this set must have a test split" for name in absent]
    if faults or not args.names:
        say(f"oar data: {'; '.join(faults) or 'NAME is missing'}; oar data --list lists the data sets", sys.stderr)
        return 2
    if importlib.util.find_spec("datasets") is None:
        return missing_package("data", "datasets")

    try:
        prepared = prepare(args.names, args.out, args.local, args.decontaminate, repeats)
    except DataError as error:
        say(f"oar data: {error}", sys.stderr)
        return 1
    written = table("data set", "split", "rows", "dropped")
    for part in prepared:
        dropped = ", ".join(f"{count} {reason}" for reason, count in part.dropped.items()) or "0"
        written.add_row(part.name, part.split, str(part.rows), dropped)
    console().print(written)
    for part in prepared:
        if part.in_evaluation and not args.decontaminate:
            rows = f"{part.in_evaluation} training rows are also in an evaluation set"
            say(f"{part.name}: {rows}: --decontaminate drops them")
    say(f"written to {args.out}")
    return 0
