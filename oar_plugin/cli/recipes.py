"""`oar recipes`: the recipes that come with OAR."""

import argparse
import shutil
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from oar_plugin.hosts.verl.recipe import RecipeError, find_recipe, recipe_names, recipes_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="copy")
    copy = commands.add_parser("copy", help="copy a recipe to change it")
    copy.add_argument("name", metavar="NAME", help="of a recipe; cluster: the templates of `oar launch --template`")
    copy.add_argument("folder", type=Path, metavar="DIR", help="which is made")
    parser.epilog = "Every command that takes a recipe takes one of these names, or a folder."


def run(args: argparse.Namespace) -> int:
    if args.what == "copy":
        return _copy(args.name, args.folder)
    table = Table(box=SIMPLE_HEAD)
    for title in ("recipe", "what", "nodes and GPUs", "engine"):
        table.add_column(title, no_wrap=title == "recipe")
    for name in recipe_names():
        table.add_row(name, *summary(find_recipe(name)))
    Console().print(table)
    return 0


def summary(recipe: Path) -> tuple[str, str, str]:
    """What it trains, on which nodes, with which engine: the first line of its `recipe.yaml`, `# WHAT: NODES, ENGINE.`"""
    line = (recipe / "recipe.yaml").read_text().splitlines()[0]
    what, _, where = line.strip("# .").partition(": ")
    nodes, _, engine = where.partition(", ")
    return what, nodes, engine


def _copy(name: str, folder: Path) -> int:
    try:
        source = recipes_folder() / "cluster" if name == "cluster" else find_recipe(name)
        shutil.copytree(source, folder)
    except FileExistsError:
        print(f"oar recipes: {folder} exists: name a folder that is not there yet", file=sys.stderr)
        return 2
    except (RecipeError, OSError) as error:
        print(f"oar recipes: {error}", file=sys.stderr)
        return 2
    print(f"copied to {folder}; now: oar launch {f'RECIPE --template {folder}/FILE' if name == 'cluster' else folder}")
    return 0
