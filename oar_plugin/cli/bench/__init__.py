"""`oar bench`: what importance costs on this machine, and what it brings. A module for each thing that is measured."""

from __future__ import annotations

import argparse
import importlib

MODULES = {
    "step": "step",
    "perturbation": "perturbation",
    "run": "whole_run",
    "scaling": "scaling",
    "learning": "learning",
    "fidelity": "fidelity",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `oar bench` on `parser`."""
    commands = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for module in MODULES.values():
        importlib.import_module(f"{__name__}.{module}").add(commands)


def run(args: argparse.Namespace) -> int:
    """Run `oar bench`; 0, 1 when the candidates disagree or a run fails, or 2 for arguments that cannot work."""
    return int(importlib.import_module(f"{__name__}.{MODULES[args.bench]}").run(args))
