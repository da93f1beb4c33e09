"""Starts every launch and compares them: tables, verdicts, a CSV and plots."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from benchmarks.report import COLOURS, Report, Table, subplots
from benchmarks.scaling.launch import WORKER, run_launch
from benchmarks.scaling.layouts import Kind, Launch, Layout, Mode, Work, plan_series
from benchmarks.statistics import paired_ratio, ratio_of_medians
from benchmarks.study import Progress, silent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT = 1.05
"""How large a layout's ratio OAR / GRPO may be, over that of the layout it is compared with."""

STEPS_TABLE = {
    "layout": "{layout}{star}",
    "processes": "{processes}",
    "responses": "{responses}",
    "GRPO, s": "{grpo_seconds:.3g}",
    "OAR, s": "{oar_seconds:.3g}",
    "OAR / GRPO": "{ratio:.3f}",
    "rounds": "{ratio_low:.2f} .. {ratio_high:.2f}",
    "of CPU time": "{cpu_ratio:.3f}",
    "efficiency": "{grpo_efficiency:.0%}, {oar_efficiency:.0%}",
}
"""Columns of a series, from those of `figures_of`."""
PHASES_TABLE = {
    "layout": "{layout}{star}",
    "responses": "{responses}",
    "log-probs": "{grpo_log_prob_seconds:.3g}",
    "with importance": "{oar_log_prob_seconds:.3g}",
    "gate": "{oar_gate_seconds:.3g}",
    "update": "{grpo_update_seconds:.3g}",
    "OAR's update": "{oar_update_seconds:.3g}",
    "CPU time": "{grpo_cpu_seconds:.3g}, {oar_cpu_seconds:.3g}",
}

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
    mode: tuple[Mode, ...] = ("weak", "strong")
    """Of data parallelism."""
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
    project_gpu: str = "H100-80"
    """Of --project, as in oar plan --gpu."""
    out: Path | None = None
    """Write scaling_DEVICE.md, .json, .csv and .png into this folder (default: only the terminal)."""

    def series(self) -> Series:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        self.check()
        if min(self.processes) < 1:
            raise ValueError(f"--processes {min(self.processes)}: must be at least 1")
        if self.launcher == "none" and self.runs is None:
            raise ValueError("--launcher none: needs --runs DIR, the folder with the result files")
        default: tuple[Kind, ...] = () if self.layout else ("data", "tensor", "pipeline", "sequence")
        kinds = default if self.parallel is None else self.parallel
        layouts = [Layout.parse(text) for text in self.layout]
        return plan_series(self.responses, kinds, self.mode, self.processes, layouts)


def measure(settings: Settings, progress: Progress = silent) -> Report | str:
    """Measure each layout; with `--launcher print`, say what would.

    Raises:
        ValueError: settings that cannot work.
        RuntimeError: no layout could be measured.
    """
    if settings.project:
        from benchmarks.scaling import projection

        return projection.measure(settings, progress)
    series = settings.series()
    every = dict.fromkeys(launch for each in series.values() for launch in each)
    launches = sorted(every, key=lambda launch: launch.layout.processes)
    measured: Measured = {}
    failed: dict[Launch, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        runs = settings.runs or Path(temporary if settings.launcher == "torchrun" else "runs")
        if settings.launcher == "print":
            told = {launch: shlex.quote(launch.argument(settings, runs)) for launch in launches}
            return "\n".join(f"# {x.layout.processes} processes\ntorchrun ... -m {WORKER} {told[x]}" for x in launches)
        runs.mkdir(parents=True, exist_ok=True)
        for done, launch in enumerate(launches):
            progress(str(launch), done, len(launches))
            try:
                if settings.launcher == "none":
                    measured[launch] = launch.result(settings, runs)
                else:
                    measured[launch] = run_launch(launch, settings, runs, settings.timeout)
            except RuntimeError as error:
                failed[launch] = str(error)
    if not measured:
        raise RuntimeError("nothing was measured; " + "; ".join(f"{launch}: {why}" for launch, why in failed.items()))
    return report_of(settings, series, measured, failed)


def steps(found: dict[str, Any], method: str, kind: str = "seconds") -> np.ndarray:
    """Seconds of a method's whole steps, a value a round."""
    return np.sum(list(found[kind][method].values()), axis=0)


def ratios(found: dict[str, Any], kind: str = "seconds") -> np.ndarray:
    """OAR over GRPO, a value a round: both ran one right after the other."""
    return steps(found, "oar", kind) / steps(found, "grpo", kind)


def figures_of(series: Series, measured: Measured) -> pd.DataFrame:
    """A row for each launch of each series that was measured, in medians."""
    rows: list[dict[str, Any]] = []
    for name, (base, *others) in series.items():
        for launch in filter(measured.__contains__, (base, *others)):
            found, layout, rounds = measured[launch], launch.layout, ratios(measured[launch])
            machine, shown = found["machine"], {"series": name, "layout": str(layout), "processes": layout.processes}
            row: dict[str, Any] = {**shown, "responses": launch.responses, "ratio": np.median(rounds)}
            row |= {"ratio_low": min(rounds), "ratio_high": max(rounds)}
            row["cpu_ratio"] = np.median(ratios(found, "cpu_seconds"))
            cores = machine["cores"] * machine["nodes"] if machine["device"] == "cpu" else np.inf
            row["processes_a_core"] = layout.processes / cores
            share = launch.responses / base.responses * base.layout.processes / layout.processes
            for method, phases in found["seconds"].items():
                row[f"{method}_seconds"] = np.median(steps(found, method))
                # The seconds that the base's work would take at this size if it were shared out for nothing.
                ideal = share * np.median(steps(measured[base], method)) if base in measured else np.nan
                row[f"{method}_efficiency"] = ideal / row[f"{method}_seconds"]
                row[f"{method}_cpu_seconds"] = np.median(steps(found, method, "cpu_seconds"))
                row |= {f"{method}_{phase}_seconds": np.median(values) for phase, values in phases.items()}
            rows.append(row)
    return pd.DataFrame(rows)


def verdicts(series: Series, measured: Measured) -> Iterator[list[str]]:
    """For each layout: its ratio over that of the layout it is compared with."""
    for name, (base, *others) in series.items():
        for launch in others:
            if base in measured and launch in measured:
                ours, theirs = ratios(measured[launch]), ratios(measured[base])
                quotient = ratio_of_medians(ours.tolist(), theirs.tolist())
                cpu = [np.median(ratios(measured[x], "cpu_seconds")) for x in (launch, base)]
                compared = f"{name}: {launch.layout.processes} against {base.layout.processes}"
                shown = [f"{np.median(ours):.3f} / {np.median(theirs):.3f}", str(quotient), f"{cpu[0] / cpu[1]:.3g}"]
                yield [compared, *shown, quotient.verdict(LIMIT)]


def table(title: str, figures: pd.DataFrame, columns: dict[str, str]) -> Table:
    """Where processes share cores the layout has a star."""
    rows = figures.assign(star=np.where(figures["processes_a_core"] > 1, "*", "")).to_dict("records")
    return Table(title, list(columns), [[cell.format(**row) for cell in columns.values()] for row in rows])


def report_of(settings: Settings, series: Series, measured: Measured, failed: dict[Launch, str]) -> Report:
    figures = figures_of(series, measured)
    columns = ("series", "ratios", "quotient (95 %)", "of CPU time", "verdict")
    title = f"OAR / GRPO, over that of the first layout: at most {LIMIT:g}"
    tables = [Table(title, columns, list(verdicts(series, measured)))]
    tables += [table(str(name), rows, STEPS_TABLE) for name, rows in figures.groupby("series", sort=False)]
    tables.append(table("Seconds by phase", figures.drop_duplicates(["layout", "responses"]), PHASES_TABLE))
    if failed:
        reasons = [[str(launch.layout), str(launch.responses), why] for launch, why in failed.items()]
        tables.append(Table("Failed", ("layout", "responses", "reason"), reasons))
    machine = list(measured.values())[-1]["machine"]  # of the largest launch
    return Report(
        title="Scaling of the log-prob pass, importance and the update",
        stem=f"scaling_{machine['device']}",
        command="",
        machine=machine,
        tables=tables,
        notes=notes(settings, list(measured.values()), figures),
        runs={"launches": list(measured.values()), "failed": {str(launch): why for launch, why in failed.items()}},
        figure=partial(draw, figures),
        extra={"csv": figures.to_csv(index=False, float_format="%.6g")},
        failed=bool(failed),
    )


def notes(settings: Settings, measured: list[dict[str, Any]], figures: pd.DataFrame) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    machine = measured[-1]["machine"]
    rounds = sorted({len(ratios(found)) for found in measured})
    loads = [found["machine"]["load_average_before"][0] for found in measured]
    update = [paired_ratio(f["seconds"]["oar"]["update"], f["seconds"]["grpo"]["update"]).value for f in measured]
    scores = np.array([found["scores"] for found in measured])
    lines = [
        f"{settings.model or f'{settings.size} (qwen2, random weights)'}, {measured[0]['parameters'] / 1e6:.1f}M parameters "
        f"(tied ones once), {settings.dtype}; responses of {settings.response_length} tokens after prompts of "
        f"{settings.prompt_length}, answers of {settings.answer_length}, packed, {settings.micro_batch} sequences a "
        f"micro-batch and rank, {settings.scored_share:.0%} of the responses scored ({settings.importance}), activation "
        f"checkpointing {'on' if settings.checkpointing else 'off'}. Nodes: {machine['nodes']}; backend {machine['backend']}.",
        "Through verl's engines (`fsdp`: FSDP2 and Ulysses; `megatron`: with its sequence parallelism where tensor > 1). GRPO: "
        "log-prob pass with entropy, update with verl's PPO loss and one optimizer step on the whole batch. OAR: the same with "
        "importance in the log-prob pass, and the gate, which rank 0 runs on as many rows as the whole batch has. Generation, "
        "rewards, Ray, the transport of the batch and the exchange of weights are not in it.",
        f"{' to '.join(map(str, rounds))} rounds after a warm-up; in each both methods take the same batch phase by phase in "
        "turn, and who goes first alternates. Every phase begins at a barrier and lasts until the slowest process has done it; "
        "a step is the sum of its phases. Seconds are medians; OAR / GRPO is the median of the rounds' ratios, with the "
        "lowest and the highest round beside it.",
        "The quotient's interval is a bootstrap over the rounds. Below one, OAR's share shrinks as processes are added.",
        "Efficiency, GRPO's and OAR's: the time that the first layout's work would take if sharing it out cost nothing, over "
        "the measured time. CPU time is of all processes: it knows nothing of waiting, and little of other work.",
        f"Load average of a minute when a launch began: {min(loads):g} to {max(loads):g}.",
        f"Control: the update is the same work in both methods; OAR's over GRPO's was {np.median(update):.3f} (median of the "
        f"launches; {min(update):.3f} to {max(update):.3f}).",
        "Importance of the first response, before any update, differed between launches by at most "
        f"{np.abs(scores - scores[0]).max() / scores[0].max():.1g} of its largest score.",
    ]
    if machine["device"] == "cpu":
        lines.append(
            "CPU: gloo, and stand-ins for flash-attention, NCCL's all-to-all, CUDA and TransformerEngine "
            "(oar_plugin/hosts/verl/cpu); Megatron with its ordinary optimizer, without clipping."
        )
    if (figures["processes_a_core"] > 1).any():
        lines.append(
            f"PROCESSES SHARE CORES in the rows marked `*`: there are {machine['cores']} cores. Their seconds and efficiencies "
            "say nothing about speed-up; both methods suffer alike, and only the ratio is to be read."
        )
    return lines


def draw(figures: pd.DataFrame) -> Figure:
    """Ratio, seconds and efficiency by number of processes."""
    figure, panels = subplots(1, 3, figsize=(12, 4.8))
    for number, (name, rows) in enumerate(figures.groupby("series", sort=False)):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": "o", "markersize": 4}
        x = rows["processes"] * 1.02 ** (number - figures["series"].nunique() / 2)  # beside one another
        spread = (rows["ratio"] - rows["ratio_low"], rows["ratio_high"] - rows["ratio"])
        panels[0].errorbar(x, rows["ratio"], spread, linewidth=1, capsize=3, label=name, **style)
        panels[0].axhline(rows["ratio"].iloc[0] * LIMIT, color=style["color"], linewidth=0.8, linestyle=":")
        for panel, what in zip(panels[1:], ("seconds", "efficiency"), strict=True):
            panel.plot(x, rows[f"grpo_{what}"], "--", **style)
            panel.plot(x, rows[f"oar_{what}"], "-", **style)
            panel.set(title=f"{what} of a step\n(dashed: GRPO, solid: OAR)")
    panels[0].set(title=f"OAR / GRPO, lowest to highest round\n(dotted: {LIMIT:g} of the first)")
    sizes = sorted(figures["processes"].unique())
    for panel in panels:
        panel.set(xscale="log", xlabel="processes", ylim=(0 if panel is not panels[0] else None, None))
        panel.set_xticks(sizes, map(str, sizes))
        panel.minorticks_off()
    if (figures["processes_a_core"] > 1).any():
        figure.suptitle(
            "Processes share cores: seconds and efficiencies are no speed-up, the ratio is what is measured"
        )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure
