"""`oar bench`: what importance costs on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

_STEP_HELP = """\
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

_STEP_EXAMPLES = """\
examples:
  oar bench step --size 10m --responses 16 --rounds 3        a minute or a few on a laptop
  oar bench step --size 1.5b --dtype bfloat16                on a GPU
  oar bench step --scored-share 0.5                          half of the groups have zero advantage, and are skipped
  oar bench step --importance oar_g                          the paper's estimator in our fused form: two forwards
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `oar bench` on `parser`."""
    commands = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    step = commands.add_parser(
        "step",
        help="cost of importance in a training step, against the log-prob pass, the update and the published code",
        description=_STEP_HELP,
        epilog=_STEP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = step.add_argument_group("model")
    model.add_argument(
        "--size",
        default="0.1b",
        choices=("tiny", "10m", "50m", "0.1b", "0.5b", "1.5b", "7b"),
        help="parameters, about (tiny is for tests; default: %(default)s)",
    )
    model.add_argument("--architecture", default="qwen2", choices=("qwen2", "llama"), help="default: %(default)s")
    model.add_argument("--vocab", type=int, help="vocabulary (default: 32000; 152064 for 7b)")
    model.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of weights and computation (default: %(default)s)",
    )
    model.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto takes CUDA where there is one (default: %(default)s)",
    )
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
        choices=("fisher", "oar_g"),
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
    """Run `oar bench`; 0, or 2 for arguments that cannot work."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressBar

    from oar_plugin.bench import report
    from oar_plugin.bench.step import Settings, measure, steps

    values = {name: value for name, value in vars(args).items() if name in Settings.__dataclass_fields__}
    settings = Settings(**values)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        settings.check()
        with ProgressBar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=steps(settings))
            begun = False

            def progress(what: str) -> None:
                nonlocal begun
                bar.update(task, description=what, advance=1 if begun else 0)
                begun = True

            result = measure(settings, progress)
    except ValueError as error:
        Console(stderr=True).print(f"oar bench step: {error}", style="red", markup=False, highlight=False)
        return 2
    console.print(report.table(result))
    console.print(report.target_table(result))
    for note in report.notes(result):
        console.print(f"- {note}", markup=False, highlight=False)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = f"step_{result.machine['device']}_{settings.size}"
        (args.out / f"{stem}.md").write_text("# What importance costs in a step\n\n" + report.markdown(result))
        (args.out / f"{stem}.json").write_text(report.to_json(result) + "\n")
        console.print(f"written: {args.out / stem}.md, {args.out / stem}.json", markup=False)
    return 0
