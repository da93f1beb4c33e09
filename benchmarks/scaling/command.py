"""`oar bench scaling`: how GRPO's and OAR's step scale over processes."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common_command import complain, print_notes, progress_bar, write_report
from benchmarks.scaling.arguments import add_settings, settings_of
from benchmarks.scaling.measure import KINDS, MODES

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.scaling.measure import Failed, Launch, Measured
    from benchmarks.scaling.report import Result

_HELP = """\
Measure how a training step scales over processes, GRPO and OAR side by side: log-prob pass, importance and update through
verl's own engines (FSDP2 with Ulysses; Megatron), on CPUs with gloo or on GPUs with NCCL. Needs verl; for tensor, pipeline and
context also megatron-core and mbridge.

What is scaled (--parallel), each at every size of --processes:
  data      FSDP2, fully sharded; weak (as many responses a rank at every size) and strong (as many in all)
  tensor    Megatron tensor parallelism with its sequence parallelism
  pipeline  Megatron pipeline stages
  sequence  Ulysses sequence parallelism under FSDP2
  context   Megatron context parallelism
and any combination with --layout. Each layout is a launch of its own, with a time limit; one that fails is reported with its
reason, and the others go on.

How to read it: OAR / GRPO at each size, against the same at the smallest size: that it stays is the point (at most 5 % more).
Where processes share cores or a device, seconds are no speed-up.
"""

_EXAMPLES = """\
examples:
  oar bench scaling --size 1m --parallel data tensor --processes 1 2     a few minutes on a laptop
  oar bench scaling --processes 1 2 4 8 --device cuda --dtype bfloat16 --size 1.5b --responses 64 --out DIR
  oar bench scaling --launcher ray --processes 8 16 32 --model DIR --dtype bfloat16      RAY_ADDRESS names the cluster
  oar bench scaling --launcher print --layout megatron:tensor=8 megatron:tensor=8,data=8
                                        the worker's arguments, to be started by torchrun on every node (benchmarks/SCALING.md)
  oar bench scaling --launcher none --runs DIR ... --out DIR             the report of what was measured so
  oar bench scaling --project recipes/qwen2_5_7b_math                    what the planner expects on 8 to 512 GPUs
"""


def add(scaling: argparse.ArgumentParser) -> None:
    scaling.description, scaling.epilog = _HELP, _EXAMPLES
    what = scaling.add_argument_group("layouts")
    what.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="default: 1 2 4")
    what.add_argument(
        "--parallel",
        nargs="*",
        default=None,
        choices=KINDS,
        metavar="WHAT",
        help=f"of {', '.join(KINDS)} (default: data tensor pipeline sequence; with --layout: none)",
    )
    what.add_argument(
        "--mode", nargs="+", default=list(MODES), choices=MODES, help="of data parallelism (default: weak strong)"
    )
    what.add_argument(
        "--layout",
        nargs="+",
        default=[],
        metavar="LAYOUT",
        help="combinations as fsdp:data=4,sequence=2 or megatron:tensor=4,pipeline=2,data=8; compared with the first of them",
    )
    what.add_argument(
        "--project",
        nargs="+",
        type=Path,
        metavar="RECIPE",
        help="measure nothing; say what the planner expects of a recipe's GRPO and OAR on 8 to 512 GPUs",
    )
    what.add_argument(
        "--project-gpu", metavar="GPU", help="of --project, as in oar plan --gpu (default: the planner's)"
    )
    start = scaling.add_argument_group("launching")
    start.add_argument(
        "--launcher",
        default="torchrun",
        choices=("torchrun", "ray", "print", "none"),
        help="torchrun: on this machine; ray: one actor a GPU or CPU of a cluster; print: only say what to start; none: take "
        "the result files that are in --runs (default: %(default)s)",
    )
    start.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of each launch (default: %(default)g)"
    )
    start.add_argument(
        "--runs", type=Path, metavar="DIR", help="result files of the launches; shared by the nodes of a cluster"
    )
    start.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write scaling_<device>.md, .json, .csv and, with matplotlib, .png there",
    )
    add_settings(scaling)


def run(args: argparse.Namespace) -> int:
    return _measure(args) if args.project is None else _project(args)


def _project(args: argparse.Namespace) -> int:
    from rich.console import Console

    from benchmarks.scaling import projection as projection

    console = Console()
    try:
        projections = [projection.project(recipe, args.project_gpu) for recipe in args.project]
    except ValueError as error:
        return complain("scaling", error, 2)
    for each in projections:
        for table in projection.tables(each):
            console.print(table)
        print_notes(console, each.assumptions)
    if args.out is not None:
        command = shlex.join(["oar", *sys.argv[1:]])
        write_report(
            console,
            args.out,
            "scaling_projection",
            lambda plot: projection.markdown(projections, command),
            {"json": projection.to_json(projections, command) + "\n"},
        )
    return 0


def _measure(args: argparse.Namespace) -> int:
    from rich.console import Console

    from benchmarks.machine import check_device
    from benchmarks.scaling import report as report
    from benchmarks.scaling.measure import Layout, distinct, plan_series

    console = Console()
    try:
        settings = settings_of(args)
        settings.check()
        if args.launcher == "torchrun":
            check_device(settings.device)
        layouts = [Layout.parse(text) for text in args.layout]
        kinds = args.parallel if args.parallel is not None else ([] if layouts else list(KINDS[:4]))
        series = plan_series(settings, kinds, args.mode, args.processes, layouts)
        launches = distinct(series)
        if args.launcher == "none" and args.runs is None:
            raise ValueError("--launcher none: needs --runs DIR, the folder with the result files")
        if args.launcher == "print":
            _print_launches(console, launches, args)
            return 0
        with _runs_folder(args.runs) as runs, progress_bar(console, len(launches)) as progress:
            outcomes = {launch: _measure_launch(launch, args, runs, progress) for launch in launches}
    except ValueError as error:
        return complain("scaling", error, 2)
    result = report.Result(settings, series, outcomes)
    for table in report.tables(result):
        console.print(table)
    print_notes(console, report.notes(result))
    for failed in result.failed:
        text = f"failed: {failed.launch.layout}, {failed.launch.responses} responses: {failed.reason}"
        console.print(text, style="red", markup=False, highlight=False)
    if args.out is not None and result.machine is not None:
        _write_scaling(console, result, args.out)
    return 1 if result.failed else 0


def _measure_launch(
    launch: Launch, args: argparse.Namespace, runs: Path, progress: Callable[[str], None]
) -> Measured | Failed:
    from benchmarks.scaling.launch import find_result, on_ray, run_launch, torchrun

    progress(f"{launch.layout}, {launch.responses} responses")
    settings = settings_of(args)
    if args.launcher == "none":
        return find_result(launch, settings, runs)
    return run_launch(launch, settings, runs, args.timeout, on_ray if args.launcher == "ray" else torchrun)


def _print_launches(console: Console, launches: list[Launch], args: argparse.Namespace) -> None:
    """What to start on each node, one after the other."""
    from benchmarks.scaling.launch import WORKER, worker_arguments

    for launch in launches:
        text = shlex.join(worker_arguments(launch, settings_of(args), args.runs or Path("runs")))
        console.print(f"# {launch.layout.processes} processes", style="dim", markup=False, highlight=False)
        console.print(f"torchrun ... -m {WORKER} {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _runs_folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def _write_scaling(console: Console, result: Result, folder: Path) -> None:
    from benchmarks.scaling import report as report

    assert result.machine is not None
    command = shlex.join(["oar", *sys.argv[1:]])
    write_report(
        console,
        folder,
        f"scaling_{result.machine['device']}",
        lambda plot: report.markdown(result, command, plot),
        {"json": report.to_json(result, command) + "\n", "csv": report.to_csv(result)},
        lambda file: report.draw(file, result),
    )
