"""`oar`: the command line. Each sub-command lives in its own module and is imported when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {
    "doctor": "what is installed, what OAR serves here, and what to do about what is missing",
    "recipes": "list the recipes, or copy one to change it",
    "data": "make the files that the recipes train on and validate with",
    "plan": "say what a recipe takes before it starts: memory, time, what OAR adds, and whether it fits",
    "launch": "run a recipe: on this machine, on bare nodes, under SLURM or on Kubernetes",
    "inspect": "show the responses that a run dumped, each token shaded by its weight",
}
IN_THE_CHECKOUT = {
    "bench": "python -m benchmarks",
    "demo": "bash recipes/cpu_demo/run.sh",
    "smoke": "python recipes/smoke.py",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="oar",
        description="Outcome-grounded Advantage Reshaping (OAR) for verl: token credit for reasoning models.",
        epilog="In a verl run nothing of this is needed: algorithm.adv_estimator=oar is enough.",
    )
    parser.add_argument("--version", action="version", version=f"oar_plugin {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    wanted = next((a for a in arguments if a in COMMANDS), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == wanted:
            importlib.import_module(f"oar_plugin.cli.{name}").add_arguments(subparser)
    if arguments and arguments[0] in IN_THE_CHECKOUT:
        parser.error(f"oar {arguments[0]} stands in the checkout: {IN_THE_CHECKOUT[arguments[0]]}")
    # argparse does not take up a list of positional arguments again after an option, and overrides may stand anywhere.
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides += rest
    try:
        return int(importlib.import_module(f"oar_plugin.cli.{parsed.command}").run(parsed))
    except KeyboardInterrupt:
        print("oar: interrupted", file=sys.stderr)
        return 130


def _version() -> str:
    try:
        return version("oar_plugin")
    except PackageNotFoundError:  # on PYTHONPATH only; `oar doctor` says what to do
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
