"""`oar bench fidelity`: why the weights should be believed, or not."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from benchmarks.common_command import complain, print_notes, progress_bar, write_report
from benchmarks.options import add_fields, fields

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
benchmarks.fidelity.responses.MicroBatch; benchmarks/candidates/fidelity in the source has many.
"""


def add(fidelity: argparse.ArgumentParser) -> None:
    from benchmarks.fidelity.measure import Settings

    fidelity.description, fidelity.epilog = _HELP, _EXAMPLES
    tasks = {"tasks": "names", "seeds": "models a task"}
    add_fields(fidelity.add_argument_group("tasks with known causal tokens"), Settings, tasks)
    own = {
        "model": "a folder that transformers loads a causal LM from",
        "responses_file": "what it wrote, JSON Lines; see below",
        "answer_patterns": "how answers are written, as algorithm.oar.answer_patterns",
    }
    add_fields(fidelity.add_argument_group("a model of your own"), Settings, own)
    how = {
        "responses": "a model; of a file the first so many lines, 0 for all",
        "curves": "responses a model with a deletion curve",
        "dtypes": "of weights and computation",
        "probe": "the outcome that is watched",
        "also": "files with more estimators",
        "micro_batch": "responses at a time",
        "rounds": "of the timing",
        "device": "auto takes CUDA where there is one",
        "seed": "of sampling, signs and noise",
    }
    add_fields(fidelity.add_argument_group("measurement"), Settings, how)
    fidelity.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write fidelity_<device>.md, .json, .html and, with matplotlib, .png there (default: only the terminal)",
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from benchmarks.fidelity import report as report
    from benchmarks.fidelity.measure import Settings, estimators, measure, pieces_of_work
    from benchmarks.fidelity.page import html
    from benchmarks.fidelity.sources import file_source, task_sources

    settings = Settings(**fields(args, Settings))
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
