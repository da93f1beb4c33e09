"""`oar bench run`: what OAR adds to whole training steps of verl."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common_command import measure_and_report
from benchmarks.options import add_fields, fields

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
  oar bench run --importance oar_g                     the paper's gradient estimator
  oar bench run --out benchmarks                       with a page, a JSON file and a plot
"""


def add(whole: argparse.ArgumentParser) -> None:
    from benchmarks.run.measure import SIZES, Settings
    from oar_plugin.credit.importance import IMPORTANCES

    whole.description, whole.epilog = _HELP, _EXAMPLES
    work = {
        "size": "parameters, about",
        "prompts": "prompts a step",
        "n": "responses a prompt",
        "prompt_length": "tokens each",
        "response_length": "tokens each",
        "scored_share": "share of the prompts whose responses have unequal rewards, and so an advantage",
        "micro_batch": "sequences at a time",
    }
    add_fields(whole.add_argument_group("work of a step"), Settings, work, size=SIZES)
    how = {
        "importance": f"of OAR's steps: {', '.join(IMPORTANCES)}, or python:<module>:<class>; masked copies run in the actor",
        "checkpointing": "activation checkpointing in the actor; on, as in verl",
        "steps": "counted steps of each method in a run, after a warm-up of one each",
        "rounds": "runs of verl",
        "control": "then run GRPO alone, with verl's own trainer, to compare",
        "seed": "of weights and sampling",
    }
    add_fields(whole.add_argument_group("measurement"), Settings, how)
    whole.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write run_cpu.md, .json and, with matplotlib, .png there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    from benchmarks.run import report as run_report
    from benchmarks.run.measure import Settings, measure, steps_in_all

    settings = Settings(**fields(args, Settings))
    return measure_and_report("run", settings, steps_in_all, measure, run_report, lambda result: "run_cpu", args.out)
