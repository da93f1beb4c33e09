"""`oar recipes` lists the recipes that come with OAR, or copies one."""

import argparse
import re
import shlex
import shutil
import sys
from pathlib import Path

from oar_plugin.output import say
from oar_plugin.runs.recipe import RecipeError, find_recipe, recipe_names, recipes_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Every command that takes a recipe takes one of these names, or a folder."
    copy = parser.add_subparsers(dest="what", metavar="copy").add_parser("copy", help="copy a recipe to change it")
    copy.add_argument("name", metavar="NAME", help="a recipe; cluster: the templates of `oar launch --template`")
    copy.add_argument("folder", type=Path, metavar="DIR", help="new folder")


def run(args: argparse.Namespace) -> int:
    if args.what == "copy":
        return _copy(args.name, args.folder)
    from oar_plugin.cli.tables import console, table

    listed = table("recipe", "what", "nodes and GPUs", "engine")
    listed.columns[0].no_wrap = True
    for name in recipe_names():
        listed.add_row(name, *summary(find_recipe(name)))
    console().print(listed)
    return 0


def summary(recipe: Path) -> tuple[str, str, str]:
    """Return model and data, nodes, and engine, from the first line of `recipe.yaml`: `# WHAT: NODES, ENGINE.`"""
    what, _, where = (recipe / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0].strip("# .").partition(": ")
    nodes, _, engine = where.partition(", ")
    return what, nodes, engine


def _copy(name: str, folder: Path) -> int:
    try:
        source = recipes_folder() / "cluster" if name == "cluster" else find_recipe(name)
        if folder.exists():
            raise RecipeError(f"{folder} exists: name a folder that is not there yet")
    except RecipeError as error:
        say(f"oar recipes: {error}", sys.stderr)
        return 2
    shutil.copytree(source, folder)
    if source.parent == recipes_folder():  # OAR's own: the copy's commands, links and default run name become its own
        for file in (file for file in folder.iterdir() if file.suffix in (".md", ".yaml")):
            text = file.read_text(encoding="utf-8").replace(f"recipes/{source.name}", shlex.quote(str(folder)))
            own_name = re.sub(r"[^\w.-]", "_", folder.name, flags=re.ASCII)
            text = text.replace(f"experiment_name: {source.name}-", f"experiment_name: {own_name}-")
            file.write_text(text.replace("](../", f"]({recipes_folder()}/"), encoding="utf-8")
    say(f"copied to {folder}; now: oar launch {f'RECIPE --template {folder}/FILE' if name == 'cluster' else folder}")
    return 0
