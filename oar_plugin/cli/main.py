"""`oar`: the command line. Each sub-command lives in its own module and is imported when it is called."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from oar_plugin import __version__
from oar_plugin.cli.arguments import missing_package
from oar_plugin.output import did_you_mean, printable, say

COMMANDS = {
    "doctor": "say whether a run would start here, and what to do about what is missing",
    "recipes": "list the recipes, and say how to copy one",
    "data": "make the files that the recipes train on and validate with",
    "plan": "say what a recipe needs before it starts: memory, time, what OAR adds, and whether it fits",
    "launch": "run a recipe: on this machine, on bare nodes, under SLURM or on Kubernetes",
    "eval": "grade checkpoints on benchmarks: avg@k, pass@k and maj@k with standard errors, one table for several runs",
    "inspect": "show the responses that a run dumped, each token shaded by its weight",
}


class _Parser(argparse.ArgumentParser):
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Show what the command was given, but let it steer no terminal."""
        super().exit(status, message and printable(message))


def make_parser(commands: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of `oar`, with the arguments of these sub-commands."""
    parser = _Parser(
        prog="oar",
        description="Outcome-grounded Advantage Reshaping (OAR) for verl: token credit for reasoning models.",
        epilog="In a verl run nothing of this is needed: algorithm.adv_estimator=oar is enough. Exit status: 0 all is well; "
        "1 it does not fit, something is missing, or what ran failed; 2 wrong input; 3 not everything could be checked; "
        "130 interrupted. For completion: pip install shtab; shtab --shell=bash oar_plugin.cli.main.make_parser > "
        "~/.local/share/bash-completion/completions/oar",
    )
    parser.add_argument("--version", action="version", version=f"oar_plugin {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        subparser.set_defaults(parser=subparser)
        if name in commands:
            importlib.import_module(f"oar_plugin.cli.{name}").add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command and return its exit status, as in `oar --help`. SystemExit: argparse has printed why."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may lack a printed character
            stream.reconfigure(errors="replace")
    command = next((word for word in arguments if not word.startswith("-")), "")
    parser = make_parser({command})
    if not arguments:
        parser.print_help()
        return 2
    if command and command not in COMMANDS:
        parser.error(f"{command}: no such command; allowed: {', '.join(COMMANDS)}{did_you_mean(command, COMMANDS)}")
    # Overrides may stand behind options, where argparse does not continue a list of positional arguments.
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in rest)):
        parsed.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides += rest
    try:
        status = int(importlib.import_module(f"oar_plugin.cli.{command}").run(parsed))
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        return missing_package(command, error.name)
    except BrokenPipeError:  # of `oar ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:  # of what was given
        say(f"oar {command}: {error}", sys.stderr)
        return 2
    except OSError as error:
        place = None if error.filename is None else f"{error.filename}: {error.strerror}"
        say(f"oar {command}: {place or error}", sys.stderr)
        return 1 if place is None else 2  # an unreadable or unwritable path is wrong input
    except KeyboardInterrupt:
        say("oar: interrupted", sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
