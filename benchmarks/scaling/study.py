"""Starts every launch and compares them: tables and verdicts."""

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from benchmarks.report import Progress, Report, Table, silent
from benchmarks.scaling.layouts import DIVISIONS, FAILED, Kind, Launch, Layout, Work
from benchmarks.statistics import ratio_of_medians
from benchmarks.workload import model_line
from verl_cpu.session import session

WORKER = "benchmarks.scaling.worker"

LIMIT = 1.05
"""How large a layout's ratio OAR / GRPO may be, over that of the layout it is compared with."""

Series = dict[str, list[Launch]]
"""By name; the first launch is what the others are compared with."""
Measured = dict[Launch, dict[str, Any]]
"""What the worker measured, see `worker.measure`, of each launch that did not fail."""


@dataclass(frozen=True)
class Settings(Work):
    processes: tuple[int, ...] = (1, 2, 4)
    """Sizes of each kind; the smallest is what the others are compared with."""
    parallel: tuple[Kind, ...] | None = None
    """What is scaled (default: data tensor pipeline sequence; with --layout: nothing)."""
    layout: tuple[str, ...] = ()
    """Combinations as fsdp:data=4,sequence=2 or megatron:tensor=4,pipeline=2,data=8, compared with the first of them."""
    launcher: Literal["torchrun", "print", "none"] = "torchrun"
    """torchrun: on this machine; print: only say what to start; none: take the result files that are in --runs."""
    timeout: float = 600.0
    """Seconds, of each launch."""
    runs: Path | None = None
    """Folder of the launches' result files; shared by the nodes of a cluster."""
    project: tuple[str, ...] = ()
    """Recipes: measure nothing, and say what the planner expects of their GRPO and OAR on 8 to 512 GPUs."""
    out: Path | None = None
    """Write scaling_DEVICE.md and .json into this folder (default: only the terminal)."""

    def check(self) -> None:
        super().check()
        self.series()
        if self.launcher == "none" and self.runs is None:
            raise ValueError("--launcher none: needs --runs DIR, the folder with the result files")

    def series(self) -> Series:
        """Each kind at each number of processes, and the given layouts as a series of their own.

        Layouts with data parallelism are measured twice, `weak`, where the batch grows with the data-parallel size, and
        `strong`, where it stays. The other kinds share the work of one response, and their batch is the same at every size.
        """
        groups = {"layouts": [Layout.parse(text) for text in self.layout]} if self.layout else {}
        default: tuple[Kind, ...] = () if self.layout else ("data", "tensor", "pipeline", "sequence")
        for kind in default if self.parallel is None else self.parallel:
            engine = next(engine for engine, names in DIVISIONS.items() if kind in names)
            groups[kind] = [Layout(engine, **{kind: size}) for size in sorted(set(self.processes))]
        series: Series = {}
        for name, group in groups.items():
            for layout in group:
                if self.responses % layout.data:
                    raise ValueError(f"--responses {self.responses}: {layout} cannot share them evenly")
            strong = [Launch(layout, self) for layout in group]
            weak = [Launch(layout, replace(self, responses=self.responses * layout.data)) for layout in group]
            one_size = len({layout.data for layout in group}) == 1
            series |= {name: strong} if one_size else {f"{name}, weak": weak, f"{name}, strong": strong}
        return series


def measure(settings: Settings, progress: Progress = silent) -> Report | str:
    """Measure each layout; with `--launcher print`, say what would.

    Raises:
        ValueError: settings that cannot work.
        RuntimeError: no layout could be measured.
    """
    if settings.project:
        from benchmarks.scaling import projection

        return projection.measure(settings.project, progress)
    series = settings.series()
    every = dict.fromkeys(launch for each in series.values() for launch in each)
    launches = sorted(every, key=lambda launch: launch.layout.processes)
    measured: Measured = {}
    failed: dict[Launch, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        runs = settings.runs or Path(temporary if settings.launcher == "torchrun" else "runs")
        if settings.launcher == "print":
            told = {launch: shlex.quote(launch.argument(runs)) for launch in launches}
            return "\n".join(f"# {x.layout.processes} processes\ntorchrun ... -m {WORKER} {told[x]}" for x in launches)
        runs.mkdir(parents=True, exist_ok=True)
        for done, launch in enumerate(launches):
            progress(str(launch), done, len(launches))
            try:
                if settings.launcher == "torchrun":
                    launch.file(runs).unlink(missing_ok=True)  # must not be taken for what is measured now
                    torchrun(launch.layout.processes, launch.argument(runs), settings.timeout)
                measured[launch] = launch.result(runs)
            except RuntimeError as error:
                failed[launch] = str(error)
    if not measured:
        raise RuntimeError("nothing was measured; " + "; ".join(f"{launch}: {why}" for launch, why in failed.items()))
    return report_of(settings, series, measured, failed)


def torchrun(processes: int, argument: str, timeout_s: float) -> None:
    """Run the worker in so many processes on this machine; however it ends, none of them is left.

    Raises:
        RuntimeError: it failed or took too long.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with session() as opened, tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            ended = subprocess.run(
                [*command, "-m", WORKER, argument],
                cwd=Path(__file__).parents[2],  # where `benchmarks` is found
                env={"OMP_NUM_THREADS": "1", **os.environ, **opened.environment()},
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {timeout_s:g} s (--timeout)") from None
        if ended.returncode:
            log.seek(0)
            raise RuntimeError(reason_in(log.read(), ended.returncode))


def reason_in(log: str, status: int) -> str:
    """Why a launch failed, in a line, from what its processes printed."""
    found = [line.split(FAILED, 1)[1].strip() for line in log.splitlines() if FAILED in line]
    return found[0] if found else f"exit status {status}: ...{' '.join(log.split())[-300:]}"


def whole_steps(found: dict[str, Any], kind: str = "seconds") -> pd.DataFrame:
    """Seconds of `grpo` and `oar`, and the `ratio` of OAR over GRPO, a row a round: both ran one right after the other."""
    steps = pd.DataFrame({method: pd.DataFrame(phases).sum(axis=1) for method, phases in found[kind].items()})
    return steps.assign(ratio=steps["oar"] / steps["grpo"])


def label(launch: Launch, machine: dict[str, Any]) -> list[str]:
    """With a star where processes share cores."""
    shared = machine["device"] == "cpu" and launch.layout.processes > machine["cores"] * machine["nodes"]
    return [f"{launch.layout}{'*' * shared}", str(launch.work.responses)]


def compared(series: Series, measured: Measured) -> Table:
    """Medians of each launch of each series, and its ratio over that of the first."""
    rows = []
    for name, launches in series.items():
        base = measured.get(launches[0])
        for launch in filter(measured.__contains__, launches):
            found, verdict = measured[launch], ["", ""]
            wall, cpu = (whole_steps(found, kind) for kind in ("seconds", "cpu_seconds"))
            if base is not None and found is not base:
                quotient = ratio_of_medians(wall["ratio"].tolist(), whole_steps(base)["ratio"].tolist())
                verdict = [str(quotient), quotient.verdict(LIMIT)]
            middle, spread = wall.median(), f"{wall['ratio'].min():.2f} .. {wall['ratio'].max():.2f}"
            shown = [f"{middle.grpo:.3g}", f"{middle.oar:.3g}", f"{middle.ratio:.3f}", spread]
            rows.append([name, *label(launch, found["machine"]), *shown, f"{cpu['ratio'].median():.3f}", *verdict])
    columns = ("GRPO, s", "OAR, s", "OAR / GRPO", "rounds", "of CPU time", "of the first (95 %)", "verdict")
    title = f"OAR / GRPO, and over that of the first of a series: at most {LIMIT:g}"
    return Table(title, ("series", "layout", "responses", *columns), rows)


def phases(measured: Measured) -> Table:
    rows = []
    for launch, found in measured.items():
        grpo, oar = found["seconds"]["grpo"], found["seconds"]["oar"]
        each = [grpo["log_prob"], oar["log_prob"], oar["driver"], grpo["update"], oar["update"]]
        each += [whole_steps(found, "cpu_seconds")[method] for method in ("grpo", "oar")]
        rows.append([*label(launch, found["machine"]), *(f"{np.median(values):.3g}" for values in each)])
    columns = ("log-probs", "with importance", "driver", "update", "OAR's update", "GRPO, CPU s", "OAR, CPU s")
    return Table("Seconds by phase", ("layout", "responses", *columns), rows)


def report_of(settings: Settings, series: Series, measured: Measured, failed: dict[Launch, str]) -> Report:
    tables, reasons = [compared(series, measured), phases(measured)], {str(x): why for x, why in failed.items()}
    if failed:
        tables.append(Table("Failed", ("launch", "reason"), list(reasons.items())))
    every, told = list(measured.values()), next(iter(measured)).told()
    machine, parameters = every[-1]["machine"], every[0]["parameters"]  # of the largest launch
    said = ("layout", "responses", "path", "size", "dtype")
    arguments = ", ".join(f"{name} {value}" for name, value in told.items() if name not in said)
    model = f"{settings.model}, {parameters / 1e6:.1f}M parameters (tied ones once), {settings.dtype}"
    loads = [found["machine"]["load_average_before"][0] for found in every]
    update = [np.median(np.divide(f["seconds"]["oar"]["update"], f["seconds"]["grpo"]["update"])) for f in every]
    scores = np.array([found["scores"] for found in every])
    rounds = min(len(whole_steps(found)) for found in every)
    notes = [
        f"{model if settings.model else model_line(settings.size, parameters, settings.dtype)}; every layout with "
        f"{arguments}. Nodes: {machine['nodes']}; backend {machine['backend']}. What is in a step, and how to read this page: "
        "docs/evidence/scaling.md.",
        f"At least {rounds} rounds after a warm-up. Seconds are medians; OAR / GRPO is the "
        "median of the rounds' ratios, with the lowest and the highest round beside it; intervals are a bootstrap over rounds.",
        f"Load average of a minute when a launch began: {min(loads):g} to {max(loads):g}.",
        f"Control: the update is the same work in both methods; OAR's over GRPO's was {np.median(update):.3f} (median of the "
        f"launches; {min(update):.3f} to {max(update):.3f}).",
        "Importance of the first response, before any update, differed between launches by at most "
        f"{np.abs(scores - scores[0]).max() / scores[0].max():.1g} of its largest score.",
    ]
    if any("*" in row[0] for row in tables[1].rows):
        notes.append(
            f"PROCESSES SHARE CORES in the rows marked `*`: there are {machine['cores']} cores. Their seconds say nothing "
            "about speed-up; both methods suffer alike, and only the ratio is to be read."
        )
    title, stem = "Scaling of the log-prob pass, importance and the update", f"scaling_{machine['device']}"
    runs = {"launches": every, "failed": reasons}
    return Report(title, stem, tables, notes, runs, failed=bool(failed), machine=machine)
