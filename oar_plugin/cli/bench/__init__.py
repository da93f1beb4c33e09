"""`oar bench`: what importance costs on this machine, and what it brings. A module for each thing that is measured."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

COMMANDS = {
    "step": "cost of importance in a training step, against the log-prob pass, the update and the published code",
    "perturbation": "cost of counterfactual masking (OAR-P), in the actor and on a vLLM engine, against GRPO's step and the "
    "published procedure",
    "run": "cost of OAR in whole runs of verl on a CPU, GRPO's steps and OAR's in turn, by phase",
    "scaling": "weak and strong scaling of GRPO's and OAR's step over data, tensor, pipeline, sequence and context parallelism",
    "learning": "how fast small models learn with each importance, against GRPO and an oracle",
    "fidelity": "how well each estimator agrees with exact OAR-P and with tokens known to be causal",
}


class _Command(argparse.ArgumentParser):
    """Declares its arguments when it is called: their defaults are in what they measure with, which imports torch."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.description is None:
            _module(self.prog.rpartition(" ")[2]).add(self)
        return super().parse_known_args(args, namespace)


def _module(command: str) -> Any:
    return importlib.import_module(f"{__name__}.{'whole_run' if command == 'run' else command}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", metavar="WHAT", required=True, parser_class=_Command)
    for command, summary in COMMANDS.items():
        commands.add_parser(command, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(args: argparse.Namespace) -> int:
    return int(_module(args.bench).run(args))
