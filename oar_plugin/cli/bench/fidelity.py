"""`oar bench fidelity`: why the weights should be believed, or not."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from oar_plugin.cli.bench.common import complain, fields, print_notes, progress_bar, write_report

_HELP = """\
Score responses with every estimator of importance and hold the scores against exact OAR-P (every reasoning token replaced,
one at a time) and, where they are known, against the tokens that decide the answer.

By default small models are trained on tasks whose causal tokens are known (once, then kept on disk; the first run takes
two or three minutes a model on one core, and there are tasks times seeds of them), and sample right and wrong responses.
With --model and --responses-file the same is done for a model and responses of your own, without what nobody knows about them.

Reported for each estimator:
  Spearman, top 20 %   agreement with exact OAR-P in float32: rank correlation, overlap of the 20 % largest scores
  causal recall        share of the known causal tokens among as many top scores
  deletion             area under the answer's probability as the tokens with the largest scores are replaced; small is good
  forward, backward    passes through the layers, counted; and seconds over those of one plain forward
Tables are by task, by seed, and for right and wrong answers apart. Intervals are bootstraps over responses.
"""

_EXAMPLES = """\
examples:
  oar bench fidelity --tasks parallel --seeds 1 --responses 16       a first look
  oar bench fidelity --out DIR                                       all tasks, three models each, with pages and plots
  oar bench fidelity --model ./my_model --responses-file mine.jsonl --dtypes float32 --out DIR
  oar bench fidelity --also my_estimators.py                         with your own estimators beside

mine.jsonl has an object a line: {"prompt": "...", "response": "..."} with the chat template applied, or {"prompt_ids": [...],
"response_ids": [...]}, and optionally "correct": true or false.

my_estimators.py has a dictionary ESTIMATORS of functions (model, batch) -> scores [B, T] by name. `batch` is an
oar_plugin.bench.fidelity_responses.MicroBatch; benchmarks/candidates/fidelity in the source has many.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `oar bench fidelity`."""
    fidelity = commands.add_parser(
        "fidelity",
        help="how well each estimator agrees with exact OAR-P and with tokens known to be causal",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = fidelity.add_argument_group("tasks with known causal tokens")
    tasks.add_argument(
        "--tasks",
        nargs="+",
        default=("parallel", "lookup", "tracking", "chain"),
        metavar="TASK",
        help="default: parallel lookup tracking chain",
    )
    tasks.add_argument("--seeds", type=int, default=3, help="models a task (default: %(default)s)")
    own = fidelity.add_argument_group("a model of your own")
    own.add_argument("--model", type=Path, metavar="DIR", help="a folder that transformers loads a causal LM from")
    own.add_argument("--responses-file", type=Path, metavar="FILE", help="what it wrote, JSON Lines; see below")
    own.add_argument(
        "--answer-patterns",
        nargs="+",
        default=("boxed", "hash", "answer_tag"),
        metavar="PATTERN",
        help="how answers are written, as algorithm.oar.answer_patterns (default: boxed hash answer_tag)",
    )
    how = fidelity.add_argument_group("measurement")
    how.add_argument(
        "--responses",
        type=int,
        default=48,
        help="a model; of a file the first so many lines, 0 for all (default: %(default)s)",
    )
    how.add_argument(
        "--curves", type=int, default=12, help="responses a model with a deletion curve (default: %(default)s)"
    )
    how.add_argument(
        "--dtypes",
        nargs="+",
        default=("float32", "bfloat16"),
        choices=("float32", "bfloat16"),
        help="of weights and computation (default: both)",
    )
    how.add_argument(
        "--probe",
        default="answer_mean",
        choices=("answer_mean", "last", "answer_joint"),
        help="the outcome that is watched (default: %(default)s)",
    )
    how.add_argument("--also", nargs="+", type=Path, default=(), metavar="FILE", help="files with more estimators")
    how.add_argument("--micro-batch", type=int, default=8, help="responses at a time (default: %(default)s)")
    how.add_argument("--rounds", type=int, default=3, help="of the timing (default: %(default)s)")
    how.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto takes CUDA where there is one (default: %(default)s)",
    )
    how.add_argument("--seed", type=int, default=0, help="of sampling, signs and noise (default: %(default)s)")
    fidelity.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write fidelity_<device>.md, .json, .html and, with matplotlib, .png there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `oar bench fidelity`: see `oar_plugin.bench.fidelity`."""
    from rich.console import Console

    from oar_plugin.bench import fidelity_report as report
    from oar_plugin.bench.fidelity import Settings, estimators, measure, pieces_of_work
    from oar_plugin.bench.fidelity_page import html
    from oar_plugin.bench.fidelity_sources import file_source, task_sources

    chosen = fields(args, Settings)
    chosen.update({name: tuple(value) for name, value in chosen.items() if isinstance(value, list)})
    settings = Settings(**chosen)
    console = Console()
    try:
        settings.check()
        estimators(settings)
        with progress_bar(console, pieces_of_work(settings)) as progress:
            if settings.model is None:
                sources = task_sources(settings, partial(progress, begins=False))
            else:
                progress(f"loading {settings.model}", begins=False)
                sources = iter([file_source(settings)])
            result = measure(settings, sources, progress)
    except ValueError as error:
        return complain("fidelity", error, 2)
    summary = report.Summary(result)
    for table in report.tables(summary):
        console.print(table)
    print_notes(console, [*report.verdicts(summary), *report.notes(summary)])
    if args.out is not None:
        command = shlex.join(["oar", *sys.argv[1:]])
        stem = f"fidelity_{result.machine['device']}"
        args.out.mkdir(parents=True, exist_ok=True)
        plot = args.out / f"{stem}.png"
        drawn = report.draw(plot, summary)
        write_report(
            console,
            args.out,
            stem,
            lambda name: report.markdown(summary, name, command),
            {
                "json": report.to_json(summary, command) + "\n",
                "html": html(summary, plot if drawn else None, command),
            },
            lambda file: drawn,
        )
    return 0
