"""`oar recipes` lists the recipes that come with OAR, and says how to copy one."""

import argparse
import shlex
import shutil
import textwrap

from oar_plugin.output import say
from oar_plugin.runs.recipe import find_recipe, recipe_names, recipes_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Every command that takes a recipe takes one of these names, or a folder: a copy, for example."


def run(args: argparse.Namespace) -> int:
    indent = max(map(len, recipe_names())) + 2
    width, _ = shutil.get_terminal_size(fallback=(10_000, 1))  # in a pipe or a file a row is a line
    for name in recipe_names():
        lines = (find_recipe(name) / "recipe.yaml").read_text(encoding="utf-8").splitlines()
        row = f"{name:{indent}}{lines[0].strip('# .')}"  # `# WHAT: NODES, ENGINE.`
        say(textwrap.fill(row, width, subsequent_indent=" " * indent))
    folder = shlex.quote(str(recipes_folder()))
    say(f"To change one: cp -r {folder}/NAME MINE; in MINE/recipe.yaml set trainer.experiment_name as well")
    return 0
