"""`oar data` makes the files that recipes use for training and validation."""

import argparse
import os
import sys
from pathlib import Path

from oar_plugin.output import say
from oar_plugin.runs.math.sources import SOURCES, DataError, data_folder, prepare

_HELP = """\
Make the parquet files that recipes and oar eval read, DIR/NAME/train.parquet and DIR/NAME/test.parquet, in verl's columns: each
prompt with the instruction to box the final answer, equal rows once. Data sets, pages on the hub, licences as stated there:
"""
_EXAMPLES = """\
oar data gsm8k math math500                              for recipes with recipe/data: gsm8k_math
oar data deepmath aime24 aime25 amc23 math500            for recipes with recipe/data: deepmath
oar data math500 aime24 amc23 minerva olympiadbench      the default sets of oar eval
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, _EXAMPLES
    parser.description = _HELP + "".join(f"  {key:13}  {of.hub_id:34}  {of.licence}\n" for key, of in SOURCES.items())
    add = parser.add_argument
    add("names", nargs="+", choices=SOURCES, metavar="NAME", help="data sets, see above")
    add("--out", type=Path, metavar="DIR", help="folder to write to (default: OAR_DATA, or ~/data/oar)")
    add("--from", dest="local", type=Path, metavar="PATH", help="a copy of the repository, or a folder of copies NAME")


def run(args: argparse.Namespace) -> int:
    try:
        out = args.out or data_folder()
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(os.path.expanduser("~"), os.W_OK):
            os.environ.setdefault("HF_HOME", str(out / ".huggingface"))  # the hub's client keeps a cache
        for name in dict.fromkeys(args.names):
            for split in SOURCES[name].splits:
                say(f"{out / name / split}.parquet: {prepare(name, split, out, args.local)}")
    except (DataError, OSError) as error:
        of_folder = isinstance(error, OSError) and not args.out
        say(f"oar data: {error}{'; --out names another folder' * of_folder}", sys.stderr)
        return 1
    return 0
