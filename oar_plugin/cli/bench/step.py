"""`oar bench step`: what importance adds to a training step."""

from __future__ import annotations

import argparse
from pathlib import Path

from oar_plugin.cli.bench.common import SIZES, add_model, complain, fields, print_notes, progress_bar, write_report

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


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `oar bench step`."""
    step = commands.add_parser(
        "step",
        help="cost of importance in a training step, against the log-prob pass, the update and the published code",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = step.add_argument_group("model")
    model.add_argument(
        "--size",
        default="0.1b",
        choices=("tiny", *SIZES),
        help="parameters, about (tiny is for tests; default: %(default)s)",
    )
    add_model(model, "4096 for 1m; 152064 for 7b; else 32000")
    batch = step.add_argument_group("batch")
    batch.add_argument("--responses", type=int, default=64, help="sequences (default: %(default)s)")
    batch.add_argument("--response-length", type=int, default=512, help="tokens each (default: %(default)s)")
    batch.add_argument("--prompt-length", type=int, default=128, help="tokens before them (default: %(default)s)")
    batch.add_argument("--answer-length", type=int, default=8, help="tokens in the box (default: %(default)s)")
    batch.add_argument("--micro-batch", type=int, default=4, help="sequences at a time (default: %(default)s)")
    batch.add_argument(
        "--scored-share",
        type=float,
        default=1.0,
        help="share of the responses that get importance: those whose group has a non-zero advantage "
        "(default: %(default)s)",
    )
    how = step.add_argument_group("measurement")
    how.add_argument(
        "--importance",
        default="fisher",
        choices=("fisher", "oar_g", "onward"),
        help="estimator of b and c (default: %(default)s)",
    )
    how.add_argument(
        "--checkpointing",
        default="both",
        choices=("on", "off", "both"),
        help="candidates with activation checkpointing, without it, or both",
    )
    how.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="rounds in all; the first is a short warm-up and thrown away (default: %(default)s)",
    )
    how.add_argument(
        "--published-responses",
        type=int,
        help="time d on so many responses and scale up, which the report then says "
        "(default: as many as take a minute a round)",
    )
    how.add_argument("--threads", type=int, help="CPU threads of torch (default: torch's own choice)")
    how.add_argument("--seed", type=int, default=0, help="of weights, batch, signs and noise (default: %(default)s)")
    step.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write step_<device>_<size>.md and .json there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `oar bench step`: see `oar_plugin.cli.bench.run`."""
    from rich.console import Console

    from oar_plugin.bench import report
    from oar_plugin.bench.step import Settings, measure, steps
    from oar_plugin.bench.targets import target_table

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
