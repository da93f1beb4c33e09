"""`oar recipes` lists the recipes that come with OAR, and says how to copy one."""

import argparse
import shlex
from pathlib import Path

from oar_plugin.output import say
from oar_plugin.runs.recipe import find_recipe, recipe_names, recipes_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Every command that takes a recipe takes one of these names, or a folder: a copy, for example."


def run(args: argparse.Namespace) -> int:
    from oar_plugin.cli.tables import console, table

    listed = table("recipe", "what", "nodes and GPUs", "engine")
    listed.columns[0].no_wrap = True
    for name in recipe_names():
        listed.add_row(name, *summary(find_recipe(name)))
    console().print(listed)
    folder = shlex.quote(str(recipes_folder()))
    say(f"To change one: cp -r {folder}/NAME MINE; in MINE/recipe.yaml set trainer.experiment_name as well")
    return 0


def summary(recipe: Path) -> tuple[str, str, str]:
    """Return model and data, nodes, and engine, from the first line of `recipe.yaml`: `# WHAT: NODES, ENGINE.`"""
    what, _, where = (recipe / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0].strip("# .").partition(": ")
    nodes, _, engine = where.partition(", ")
    return what, nodes, engine
