"""`oar bench run`: what OAR adds to whole training steps of verl."""

from __future__ import annotations

import argparse
from pathlib import Path

from oar_plugin.cli.bench.common import fields, measure_and_report

_HELP = """\
Measure what OAR costs a whole training step: real verl, Ray and vLLM on the CPU, with GRPO's steps and OAR's in turn within
one run, on the same model and lengths. Builds a model with random weights; needs what `oar doctor` lists for whole
runs on a CPU, and downloads nothing.

Reported are the seconds of each phase of a step (generation, log-probs, importance, advantage, update, weight sync, rest)
and the ratio OAR / GRPO of whole steps: the median over pairs of neighbouring steps, with an interval that covers it at 95 %.
The target, for the default importance with half of the rows at zero advantage, is at most 1.10.

Responses have a fixed length, the learning rate is 0, and rewards do not depend on the text. If lengths, rewards or the share
of the rows that OAR scored differ from what was asked, no ratio is reported.
"""

_EXAMPLES = """\
examples:
  oar bench run --size 1m --steps 3 --rounds 1         a first look, a few minutes, most of them for verl to start
  oar bench run --steps 8 --control                    with GRPO alone beside it, to see that its steps are no different
  oar bench run --scored-share 1                       every row has an advantage: what OAR costs at most
  oar bench run --importance oar_g                     the paper's gradient estimator; oar_p and hybrid run masked copies
  oar bench run --out benchmarks                       with a page, a JSON file and a plot
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `oar bench run`."""
    whole = commands.add_parser(
        "run",
        help="cost of OAR in whole runs of verl on a CPU, GRPO's steps and OAR's in turn, by phase",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    work = whole.add_argument_group("work of a step")
    work.add_argument(
        "--size",
        default="10m",
        choices=("1m", "10m", "50m", "0.1b", "0.5b"),
        help="parameters, about (default: %(default)s)",
    )
    work.add_argument("--prompts", type=int, default=4, help="prompts a step (default: %(default)s)")
    work.add_argument("--n", type=int, default=4, help="responses a prompt (default: %(default)s)")
    work.add_argument("--prompt-length", type=int, default=32, help="tokens each (default: %(default)s)")
    work.add_argument("--response-length", type=int, default=128, help="tokens each (default: %(default)s)")
    work.add_argument(
        "--scored-share",
        type=float,
        default=0.5,
        help="share of the prompts whose responses have unequal rewards, and so an advantage (default: %(default)s)",
    )
    work.add_argument("--micro-batch", type=int, default=8, help="sequences at a time (default: %(default)s)")
    how = whole.add_argument_group("measurement")
    how.add_argument(
        "--importance",
        default="fisher",
        choices=("fisher", "oar_g", "onward", "oar_p", "hybrid"),
        help="of OAR's steps; oar_p and hybrid in the actor (default: %(default)s)",
    )
    how.add_argument(
        "--checkpointing",
        default="on",
        choices=("on", "off"),
        help="activation checkpointing in the actor (default: %(default)s, as in verl)",
    )
    how.add_argument(
        "--steps",
        type=int,
        default=6,
        help="counted steps of each method in a run, after a warm-up of one each (default: %(default)s)",
    )
    how.add_argument("--rounds", type=int, default=2, help="runs of verl (default: %(default)s)")
    how.add_argument("--control", action="store_true", help="then run GRPO alone, with verl's own trainer, to compare")
    how.add_argument("--seed", type=int, default=0, help="of weights and sampling (default: %(default)s)")
    whole.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write run_cpu.md, .json and, with matplotlib, .png there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `oar bench run`: see `oar_plugin.cli.bench.run`."""
    from oar_plugin.bench import run_report
    from oar_plugin.bench.run import Settings, measure, steps_in_all

    settings = Settings(**fields(args, Settings))
    return measure_and_report("run", settings, steps_in_all, measure, run_report, lambda result: "run_cpu", args.out)
