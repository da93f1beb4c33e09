"""`oar bench step`: what importance adds to a training step."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common_command import (
    complain,
    print_notes,
    progress_bar,
    write_report,
)
from benchmarks.options import MODEL, add_fields, fields

_HELP = """\
Measure what outcome-grounded importance adds to a training step, against what the step costs anyway and against the
published procedure. Builds a model with random weights; needs torch and transformers, no verl, no download.

Measured side by side, every candidate once a round:
  a   log-prob forward: what a step does anyway to get old log-probs and entropy
  b   the same forward with importance fused in: a graph down to the input embeddings and one backward to them
  c   importance alone, for runs that take log-probs from the rollout engine (bypass mode)
  d   OAR-G the published way: one response at a time, two forwards and a backward (d' keeps its weights frozen)
  e   the actor's update: forward, backward, AdamW step
  f   finding the answers, the gate, the diagnostics
A star (b*, c*, e*) means with activation checkpointing.

How to read it: (b - a) / a is what importance adds to the log-prob pass; one means that it costs a second forward.
mem(b) / mem(e) at most one means that whatever memory the update needs is enough for importance.
"""

_EXAMPLES = """\
examples:
  oar bench step --size 10m --responses 16 --rounds 3        a minute or a few on a laptop
  oar bench step --size 1.5b --dtype bfloat16                on a GPU
  oar bench step --scored-share 0.5                          half of the groups have zero advantage, and are skipped
  oar bench step --importance oar_g                          the paper's estimator in our fused form: two forwards
"""


def add(step: argparse.ArgumentParser) -> None:
    from benchmarks.step.measure import Settings
    from benchmarks.tiny.random_models import SHAPES
    from oar_plugin.credit.importance import without_copies

    step.description, step.epilog = _HELP, _EXAMPLES
    add_fields(step.add_argument_group("model"), Settings, MODEL, size=SHAPES)
    batch = {
        "responses": "sequences",
        "response_length": "tokens each",
        "prompt_length": "tokens before them",
        "answer_length": "tokens in the box",
        "micro_batch": "sequences at a time",
        "scored_share": "share of the responses that get importance: those whose group has a non-zero advantage",
    }
    add_fields(step.add_argument_group("batch"), Settings, batch)
    how = {
        "importance": f"of b and c: {without_copies()}, or python:<module>:<class>",
        "checkpointing": "candidates with activation checkpointing, without it, or both",
        "rounds": "rounds in all; the first is a short warm-up and thrown away",
        "published_responses": "time d on so many responses and scale up, which the report then says (default: as many as take "
        "a minute a round)",
        "threads": "CPU threads of torch (default: torch's own choice)",
        "seed": "of weights, batch, signs and noise",
    }
    add_fields(step.add_argument_group("measurement"), Settings, how)
    step.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write step_<device>_<size>.md and .json there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from benchmarks.step import report
    from benchmarks.step.measure import Settings, measure, steps
    from benchmarks.targets import target_table

    settings = Settings(**fields(args, Settings))
    console = Console()
    try:
        settings.check()
        with progress_bar(console, steps(settings)) as progress:
            result = measure(settings, progress)
    except ValueError as error:
        return complain("step", error, 2)
    console.print(report.table(result))
    console.print(target_table(report.targets(result)))
    print_notes(console, report.notes(result))
    if args.out is not None:
        stem = f"step_{result.machine['device']}_{settings.size}"
        page = "# What importance costs in a step\n\n" + report.markdown(result)
        write_report(console, args.out, stem, lambda plot: page, {"json": report.to_json(result) + "\n"})
    return 0
