"""`oar bench learning`: does a model learn faster with reshaped credit?"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common_command import complain, print_notes, progress_bar, write_report
from benchmarks.options import add_fields, fields

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.learning.measure import Run, Trainer

TOO_HARD = ("lookup", "tracking")
"""Tasks that models of this size do not learn in a warm start."""
# One warm model a task and warm start, about two minutes each, then a minute a run.
_HELP = """\
Train small models with GRPO and with reshaped credit, from the same start, on the same problems with the same sampling
noise, and see which learns faster. The tasks are made up so that the tokens that decide the answer are known; everything
about credit is the package's own code. One process, no downloads: a warm model takes about two minutes and is kept, a
run of 40 steps 10 to 40 seconds.

Every finished run is a file in --results and is not repeated: stop at any time, and go on with the same command. The
report covers all runs that were asked for; compare methods at their own best learning rates, with --seeds 3 at least.

With --alignment nothing is trained: it says in a minute how much of a step towards the policy gradient each method makes.

tasks:    parallel (the answer lists all results), chain (each result needs the last one); _terse: hardly any
          filler, _wordy: twice as much, so longer responses
methods:  grpo; uniform (even credit through the gate) and oracle (the causal tokens are known) as controls; every importance of
          the package: {importances}; or python:<module>:<class>
gates:    {gates}, or python:<module>:<function>
"""

_EXAMPLES = """\
examples:
  oar bench learning --tasks parallel --methods grpo fisher --seeds 1 --steps 20      a first look
  oar bench learning --tasks parallel chain --methods grpo random oracle fisher \\
      --lr 3e-4 6e-4 1.2e-3 --seeds 3 --out benchmarks                               a study, with a page and a plot
  oar bench learning --tasks chain --methods grpo fisher --gate bi_level              another gate
  oar bench learning --tasks chain --methods grpo oracle random fisher onward --alignment 10
  oar bench learning --tasks chain --methods grpo onward --through-verl
"""


def add(command: argparse.ArgumentParser) -> None:
    from benchmarks.importance import DEFAULT
    from benchmarks.learning.measure import Run
    from benchmarks.tiny.tasks import TASKS
    from oar_plugin.credit.gate import GATES
    from oar_plugin.credit.importance import IMPORTANCES

    command.description = _HELP.format(importances=", ".join(IMPORTANCES), gates=", ".join(GATES))
    command.epilog = _EXAMPLES
    study = command.add_argument_group("study")
    tasks = [name for name in TASKS if name not in TOO_HARD]
    study.add_argument("--tasks", nargs="+", default=tasks[:1], choices=tasks, help=f"default: {tasks[0]}")
    methods = ["grpo", DEFAULT]
    study.add_argument("--methods", nargs="+", default=methods, metavar="M", help=f"default: {' '.join(methods)}")
    study.add_argument("--lr", nargs="+", type=float, default=[6e-4], help="learning rates (default: 6e-4)")
    study.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    study.add_argument(
        "--warm-starts",
        type=int,
        default=1,
        help="different models to start from, those that did not learn the task left out; seeds take turns "
        "(default: %(default)s)",
    )
    run = {
        "steps": "batches, one update each",
        "prompts": "of a batch",
        "copies": "responses to a prompt",
        "evaluate_every": "steps between measurements on held-out problems",
    }
    add_fields(command.add_argument_group("a run"), Run, run)
    credit = {
        "probe": "what the answer's distribution is",
        "warmup_steps": "steps with the probe 'last' before --probe takes over",
        "gate": "from importance to weights",
        "tau": f"quantile of the gate (default: {', '.join(f'{gate.tau} for {name}' for name, gate in GATES.items())})",
        "beta": "boost above it",
        "floor": "smallest weight below it",
        "positive_only": "reshape only responses better than their group",
    }
    add_fields(command.add_argument_group("credit"), Run, credit)
    command.add_argument(
        "--results",
        type=Path,
        default=Path("learning_runs"),
        metavar="DIR",
        help="where finished runs are kept (default: %(default)s)",
    )
    command.add_argument(
        "--through-verl",
        action="store_true",
        help="train with real verl, Ray and vLLM on this machine's CPU, five to ten minutes a run; needs the extra [cpu]",
    )
    command.add_argument("--finished", action="store_true", help="train nothing: report on the runs that are finished")
    command.add_argument(
        "--variants",
        action="store_true",
        help="train nothing: a line for every setting that has a finished run of --steps steps in --results, against GRPO at "
        "the same learning rate",
    )
    command.add_argument(
        "--cache", type=Path, metavar="DIR", help="where warm models are kept (default: ~/.cache/oar_plugin)"
    )
    command.add_argument(
        "--alignment",
        type=int,
        metavar="BATCHES",
        help="do not train: compare gradients over so many batches, against an average over five times as many",
    )
    command.add_argument(
        "--after",
        type=int,
        default=0,
        metavar="STEPS",
        help="of GRPO before --alignment measures (default: %(default)s)",
    )
    command.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write learning_cpu.md (learning_verl.md), .json and, with matplotlib, .png there",
    )


def run(args: argparse.Namespace) -> int:
    try:
        import scipy  # noqa: F401
    except ImportError as error:
        return complain("learning", RuntimeError(f"{error}; the tests need SciPy: pip install 'oar_plugin[plots]'"), 1)
    from dataclasses import replace

    import torch
    from rich.console import Console

    from benchmarks.learning import report as report
    from benchmarks.learning.measure import Run, grid, study
    from benchmarks.machine import describe_machine, load_average, threads
    from recipes.cpu_demo.training import TrainingFailed

    console = Console()
    if args.seeds < 1 or args.warm_starts < 1:
        return complain("learning", ValueError("--seeds and --warm-starts must be at least 1"), 2)
    base = Run(args.tasks[0], args.methods[0], seed=0, **fields(args, Run) | {"lr": args.lr[0]})
    try:
        runs = [
            replace(each, warm_start=each.seed % args.warm_starts)
            for each in grid(base, args.tasks, args.methods, args.lr, range(args.seeds))
        ]
        for each in runs:
            each.check()
        if args.alignment is not None:
            return _align(args, runs, console)
        if args.variants:
            return _list(args, console)
        results, trainer = (args.results, None) if not args.through_verl else _through_verl(args, runs)
        with threads(args.threads), progress_bar(console, len(runs)) as progress:
            machine = describe_machine(torch.device("cpu"))
            records = study(runs, results, args.cache, progress, args.finished, trainer)
        if not records:
            raise ValueError(f"--finished: {results} holds no run of this study; leave --finished out to train them")
    except ValueError as error:
        return complain("learning", error, 2)
    except TrainingFailed as error:
        return complain("learning", error, 1)
    for table in report.tables(records):
        console.print(table)
    trained_by: report.TrainedBy = "verl" if args.through_verl else "small"
    print_notes(console, report.notes(records, trained_by))
    if args.out is not None:
        command = shlex.join(["oar", *sys.argv[1:]])
        machine["load_average_after"] = load_average()
        write_report(
            console,
            args.out,
            "learning_verl" if args.through_verl else "learning_cpu",
            lambda plot: report.markdown(records, plot, command, machine, trained_by),
            {"json": report.to_json(records, command, machine, trained_by) + "\n"},
            lambda file: report.draw(file, records),
        )
    return 0


def _through_verl(args: argparse.Namespace, runs: list[Run]) -> tuple[Path, Trainer]:
    """Where the records of `--through-verl` are kept, and what makes them."""
    from benchmarks.learning import verl as learning_verl

    for each in runs:
        learning_verl.check(each)
    results: Path = args.results / "verl"
    return results, lambda run, cache: learning_verl.train(run, run.file(results).with_suffix("").resolve(), cache)


def _list(args: argparse.Namespace, console: Console) -> int:
    """`--variants`."""
    from benchmarks.learning import report as report
    from benchmarks.learning.measure import Record

    found = [Record.from_json(file.read_text()) for file in sorted(args.results.glob("*.json"))]
    records = [record for record in found if record.run.steps == args.steps]
    if not records:
        raise ValueError(f"--variants: {args.results} holds no finished run of {args.steps} steps (--steps, --results)")
    console.print(report.variants_table(records))
    if args.out is not None:
        page = report.variants_page(records, shlex.join(["oar", *sys.argv[1:]]))
        write_report(console, args.out, "learning_variants", lambda plot: page, {})
    return 0


def _align(args: argparse.Namespace, runs: list[Run], console: Console) -> int:
    """`--alignment`: one table a task, at the first learning rate and seed."""
    from benchmarks.learning import report as report
    from benchmarks.learning.alignment import align
    from benchmarks.learning.measure import after_grpo
    from benchmarks.machine import threads

    if args.alignment < 2:
        raise ValueError("--alignment needs at least 2 batches")
    for task in args.tasks:
        chosen = [each for each in runs if each.task == task and each.seed == 0 and each.lr == args.lr[0]]
        with threads(args.threads), progress_bar(console, 6 * args.alignment + 1) as progress:
            progress("policy")
            model = after_grpo(chosen[0], args.after, args.cache)
            found = align(chosen, model, 5 * args.alignment, args.alignment, progress)
        console.print(report.alignment_table(found, args.after))
    return 0
