"""What a run of `oar bench scaling` says: a table a series, a verdict for each ratio, CSV, JSON, a Markdown page and plots."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.machine import machine_line
from benchmarks.plots import pyplot
from benchmarks.scaling.measure import PHASES, Failed, Launch, Measured, Series, Settings
from benchmarks.targets import Target, target_lines, target_table

ALLOWED = 0.05
"""How far the ratio of a layout may be above that of the layout it is compared with."""

RESAMPLES = 4000

_COLUMNS = (
    "processes",
    "responses",
    "GRPO s",
    "OAR s",
    "OAR / GRPO",
    "rounds",
    "of CPU time",
    "GRPO eff.",
    "OAR eff.",
    "CPU s",
)
_PHASE_COLUMNS = ("GRPO log-prob", "OAR log-prob", "gate", "GRPO update", "OAR update")


@dataclass
class Result:
    """A finished run: what each launch gave, measured or not."""

    settings: Settings
    series: list[Series]
    outcomes: dict[Launch, Measured | Failed]

    def measured(self, launch: Launch) -> Measured | None:
        """The figures of a launch, if it gave any."""
        outcome = self.outcomes[launch]
        return outcome if isinstance(outcome, Measured) else None

    @property
    def machine(self) -> dict[str, Any] | None:
        """That of the largest launch that was measured."""
        found = [outcome.machine for outcome in self.outcomes.values() if isinstance(outcome, Measured)]
        return found[-1] if found else None

    @property
    def failed(self) -> list[Failed]:
        """What gave no figures, and why."""
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, Failed)]


@dataclass(frozen=True)
class Row:
    """One launch of a series, in figures.

    Attributes:
        launch: what was measured.
        grpo: median seconds of a GRPO step.
        oar: median seconds of an OAR step.
        ratios: OAR over GRPO in each round.
        efficiency: of GRPO and of OAR: the seconds that the base's work would take at this size if it were shared out for
            nothing, over the measured ones; None without a base.
        cpu_seconds: of a GRPO and an OAR step, of all processes together.
        cpu_ratios: OAR's processor seconds over GRPO's in each round.
        shared: how many processes share a core; at most 1 where every process has its own device.
    """

    launch: Launch
    grpo: float
    oar: float
    ratios: tuple[float, ...]
    efficiency: tuple[float, float] | None
    cpu_seconds: tuple[float, float]
    cpu_ratios: tuple[float, ...]
    shared: float

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios: both methods of a round ran one right after the other."""
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """The same of processor seconds: other work on the machine moves them less."""
        return statistics.median(self.cpu_ratios)


def rows(result: Result, series: Series) -> list[Row]:
    """The launches of a series that were measured."""
    base = result.measured(series.base)
    found = []
    for launch in series.launches:
        measured = result.measured(launch)
        if measured is None:
            continue
        steps = {method: measured.step(method) for method in ("grpo", "oar")}
        medians = {method: statistics.median(values) for method, values in steps.items()}
        cpu = {method: measured.step(method, "cpu_seconds") for method in ("grpo", "oar")}
        efficiency = None
        if base is not None:
            ideal = [series.ideal_seconds(launch, statistics.median(base.step(method))) for method in ("grpo", "oar")]
            efficiency = (ideal[0] / medians["grpo"], ideal[1] / medians["oar"])
        cpu_medians = (statistics.median(cpu["grpo"]), statistics.median(cpu["oar"]))
        shared = _shared(launch, measured)
        found.append(
            Row(
                launch,
                medians["grpo"],
                medians["oar"],
                _quotients(steps),
                efficiency,
                cpu_medians,
                _quotients(cpu),
                shared,
            )
        )
    return found


def _quotients(steps: dict[str, list[float]]) -> tuple[float, ...]:
    return tuple(oar / grpo for oar, grpo in zip(steps["oar"], steps["grpo"], strict=True))


def _shared(launch: Launch, measured: Measured) -> float:
    machine = measured.machine
    if machine["device"] != "cpu":
        return 0.0
    return launch.layout.processes * machine["torch_threads"] / (machine["cores"] * machine["nodes"])


def targets(result: Result) -> list[Target]:
    """For each layout: its ratio over that of the layout it is compared with, with an interval from the rounds."""
    found = []
    for series in result.series:
        measured = rows(result, series)
        if result.measured(series.base) is None:
            continue
        base = measured[0]
        for row in measured[1:]:
            low, high = interval(row.ratios, base.ratios, result.settings.seed)
            name = f"{series.name}: {row.launch.layout.processes} against {base.launch.layout.processes}"
            formula = f"{row.ratio:.3f} / {base.ratio:.3f}"
            cpu = row.cpu_ratio / base.cpu_ratio if base.shared else None
            found.append(Target(name, formula, row.ratio / base.ratio, low, high, cpu, limit=1 + ALLOWED))
    return found


def interval(above: Sequence[float], below: Sequence[float], seed: int) -> tuple[float, float]:
    """Where the quotient of two medians lies with a confidence of 95 %, by bootstrap over the rounds (percentile method)."""
    source = np.random.default_rng(seed)
    medians = [np.median(source.choice(values, (RESAMPLES, len(values))), axis=1) for values in (above, below)]
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return float(low), float(high)


def disagreement(result: Result) -> float:
    """Largest difference of any launch's importance of the first response from another's, over the largest score."""
    scores = [np.array(outcome.scores) for outcome in result.outcomes.values() if isinstance(outcome, Measured)]
    return max((float(np.abs(s - scores[0]).max() / scores[0].max()) for s in scores), default=0.0)


def control(result: Result) -> tuple[float, float, float]:
    """OAR's update over GRPO's: lowest, median, highest of the launches' medians. The work is the same, so it should be one."""
    quotients = []
    for outcome in result.outcomes.values():
        if isinstance(outcome, Measured):
            pairs = zip(outcome.seconds["oar"]["update"], outcome.seconds["grpo"]["update"], strict=True)
            quotients.append(statistics.median(oar / grpo for oar, grpo in pairs))
    return min(quotients), statistics.median(quotients), max(quotients)


def notes(result: Result) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    settings, machine = result.settings, result.machine
    if machine is None:
        return ["Nothing was measured."]
    measured = next(outcome for outcome in result.outcomes.values() if isinstance(outcome, Measured))
    what = settings.model or f"{settings.size} ({settings.architecture}, random weights)"
    lines = [
        f"{what}, {measured.parameters / 1e6:.1f}M parameters (tied ones once), {settings.dtype}; responses of "
        f"{settings.response_length} tokens after prompts of {settings.prompt_length}, answers of {settings.answer_length}, "
        f"packed, {settings.micro_batch} sequences a micro-batch and rank, {settings.scored_share:.0%} of the responses scored "
        f"({settings.importance}), activation checkpointing {'on' if settings.checkpointing else 'off'}.",
        "Through verl's engines (`fsdp`: FSDP2 and Ulysses; `megatron`: with its sequence parallelism where tensor > 1). GRPO: "
        "log-prob pass with entropy, update with verl's PPO loss and one optimizer step on the whole batch. OAR: the same with "
        "importance in the log-prob pass, and the gate, which rank 0 runs on as many rows as the whole batch has. Generation, "
        "rewards, Ray, the transport of the batch and the exchange of weights are not in it.",
        f"{_rounds(result)} rounds after a warm-up; in each both methods take the same batch phase by phase in turn, and who "
        "goes first alternates. "
        "Every phase begins at a barrier and lasts until the slowest process has done it; a step is the sum of its phases. "
        "Seconds are medians; OAR / GRPO is the median of the rounds' ratios, with the lowest and highest round beside it.",
        "In the table of verdicts the range is a 95 % interval of the quotient (bootstrap over the rounds). There is no "
        "verdict where it contains the limit. A quotient below one means that OAR's share shrinks.",
        "Efficiency: the time that the first layout's work would take if sharing it out cost nothing, over the measured time.",
        "CPU s: processor seconds of all processes together, GRPO and OAR. Their ratio (of CPU time) stands beside that of "
        "wall time: it moves less when the machine does something else too, and knows nothing of waiting.",
    ]
    loads = [
        outcome.machine["load_average_before"][0]
        for outcome in result.outcomes.values()
        if isinstance(outcome, Measured) and outcome.machine["load_average_before"]
    ]
    if loads:
        lines.append(
            f"Load average of a minute when a launch began: {min(loads):g} to {max(loads):g}; what is above the "
            "number of its processes was other work."
        )
    low, middle, high = control(result)
    lines.append(
        f"Control: the update is the same work in both methods; OAR's over GRPO's was {middle:.3f} (median of the launches; "
        f"{low:.3f} to {high:.3f})."
    )
    lines.append(
        "Importance of the first response, before any update, differed between launches by at most "
        f"{disagreement(result):.1g} of its largest score."
    )
    if machine["device"] == "cpu":
        lines.append(
            "CPU: gloo, and stand-ins for flash-attention, NCCL's all-to-all, CUDA and TransformerEngine "
            "(oar_plugin/hosts/verl/cpu); Megatron with its ordinary optimizer, without clipping."
        )
    if any(row.shared > 1 for series in result.series for row in rows(result, series)):
        lines.append(
            f"PROCESSES SHARE CORES in the rows marked `*`: there are {machine['cores']} cores. Their seconds and efficiencies "
            "say nothing about speed-up; both methods suffer alike, and only the ratio is to be read."
        )
    return lines


def _rounds(result: Result) -> str:
    """How many each launch had: result files may have been measured with different numbers."""
    counts = {len(outcome.step("grpo")) for outcome in result.outcomes.values() if isinstance(outcome, Measured)}
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def tables(result: Result) -> list[Table]:
    """For the terminal: two a series, and the verdicts."""
    shown = []
    for series in result.series:
        for title, header, cells in (
            (series.name, _COLUMNS, _cells),
            ("phases, seconds", _PHASE_COLUMNS, _phase_cells),
        ):
            table = Table("layout", title=title)
            for name in header:
                table.add_column(name, justify="right")
            for row in rows(result, series):
                table.add_row(str(row.launch.layout), *cells(result, row))
            shown.append(table)
    shown.append(
        target_table(targets(result), f"OAR / GRPO of a layout over that of the first, at most {1 + ALLOWED:g}")
    )
    return shown


def _cells(result: Result, row: Row) -> list[str]:
    star = "*" if row.shared > 1 else ""
    efficiency = ["", ""] if row.efficiency is None else [f"{value:.0%}{star}" for value in row.efficiency]
    return [
        f"{row.launch.layout.processes}{star}",
        str(row.launch.responses),
        f"{row.grpo:.3g}{star}",
        f"{row.oar:.3g}{star}",
        f"{row.ratio:.3f}",
        f"{min(row.ratios):.3f} .. {max(row.ratios):.3f}",
        f"{row.cpu_ratio:.3f}",
        *efficiency,
        f"{row.cpu_seconds[0]:.3g}, {row.cpu_seconds[1]:.3g}",
    ]


def _phase_cells(result: Result, row: Row) -> list[str]:
    phase = _phases(result, row.launch)
    keys = (("grpo", "log_prob"), ("oar", "log_prob"), ("oar", "gate"), ("grpo", "update"), ("oar", "update"))
    return [f"{phase[method][name]:.3g}" for method, name in keys]


def _phases(result: Result, launch: Launch) -> dict[str, dict[str, float]]:
    """Median seconds of each phase."""
    measured = result.measured(launch)
    assert measured is not None
    return {
        method: {phase: statistics.median(values) for phase, values in phases.items()}
        for method, phases in measured.seconds.items()
    }


def markdown(result: Result, command: str, plot: str | None = None) -> str:
    """The report as a page.

    Args:
        result: the run.
        command: that made it.
        plot: file name of its plot.
    """
    lines = ["# Scaling of the log-prob pass, importance and the update", "", "```", command, "```", ""]
    if result.machine is not None:
        nodes, backend = result.machine["nodes"], result.machine["backend"]
        lines += [f"{machine_line(result.machine)} Nodes: {nodes}; backend {backend}.", ""]
    if plot is not None:
        lines += [f"![time, efficiency, ratio and phases by number of processes]({plot})", ""]
    lines += ["## OAR / GRPO by number of processes", "", *target_lines(targets(result)), ""]
    for series in result.series:
        found = rows(result, series)
        cells = [[str(row.launch.layout), *_cells(result, row)] for row in found]
        phases = [[str(row.launch.layout), *_phase_cells(result, row)] for row in found]
        lines += [f"## {series.name}", "", *_markdown_table(("layout", *_COLUMNS), cells), ""]
        lines += ["Seconds by phase (OAR's log-prob pass has importance in it):", ""]
        lines += [*_markdown_table(("layout", *_PHASE_COLUMNS), phases), ""]
    if result.failed:
        lines += [
            "## Failed",
            "",
            *(f"- `{x.launch.layout}`, {x.launch.responses} responses: {x.reason}" for x in result.failed),
        ]
        lines.append("")
    return "\n".join([*lines, "## How to read it", "", *(f"- {note}" for note in notes(result)), ""])


def _markdown_table(header: tuple[str, ...], cells: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]


def to_csv(result: Result) -> str:
    """A line a launch of a series, with medians; the phases as columns."""
    names = [
        f"{method}_{phase}" for method in ("grpo", "oar") for phase in PHASES if (method, phase) != ("grpo", "gate")
    ]
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    figures_of_a_row = ["grpo_seconds", "oar_seconds", "ratio", "ratio_low", "ratio_high", "cpu_ratio"]
    figures_of_a_row += ["grpo_efficiency", "oar_efficiency", "processes_a_core", "grpo_cpu_seconds", "oar_cpu_seconds"]
    phase_columns = [f"{name}_seconds" for name in names]
    out.writerow(["series", "mode", "layout", "processes", "responses", *figures_of_a_row, *phase_columns])
    for series in result.series:
        for row in rows(result, series):
            layout, phases = row.launch.layout, _phases(result, row.launch)
            figures = [row.grpo, row.oar, row.ratio, min(row.ratios), max(row.ratios), row.cpu_ratio]
            figures += [*(row.efficiency or ("", "")), row.shared, *row.cpu_seconds]
            figures += [phases[name.split("_", 1)[0]][name.split("_", 1)[1]] for name in names]
            cells = [f"{x:.6g}" if isinstance(x, float) else x for x in figures]
            out.writerow([series.name, series.mode, str(layout), layout.processes, row.launch.responses, *cells])
    return text.getvalue()


def to_json(result: Result, command: str) -> str:
    """Everything that was measured, every round of it."""
    content = {
        "command": command,
        "settings": asdict(result.settings),
        "launches": [x.to_dict() for x in result.outcomes.values() if isinstance(x, Measured)],
        "failed": [
            {"layout": str(x.launch.layout), "responses": x.launch.responses, "reason": x.reason} for x in result.failed
        ],
        "series": [
            {
                "name": series.name,
                "mode": series.mode,
                "launches": [
                    {**asdict(row), "launch": row.launch.name, "layout": str(row.launch.layout), "ratio": row.ratio}
                    for row in rows(result, series)
                ],
            }
            for series in result.series
        ],
        "targets": [{**asdict(target), "verdict": target.verdict} for target in targets(result)],
        "notes": notes(result),
    }
    return json.dumps(content, indent=1)


def draw(path: Path, result: Result) -> bool:
    """Time, efficiency, ratio and phases by number of processes; False without matplotlib or without two sizes."""
    series = [(each, found) for each in result.series if len(found := rows(result, each)) > 1]
    if not series:
        return False
    plt = pyplot()
    if plt is None:
        return False
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), dpi=130, layout="constrained")
    colours = plt.get_cmap("tab10").colors
    sizes = sorted({row.launch.layout.processes for _, found in series for row in found})
    for number, (each, found) in enumerate(series):
        colour, x = colours[number % 10], [row.launch.layout.processes for row in found]
        # Beside one another, so that the spreads can be told apart.
        beside = [size * 1.03 ** (number - (len(series) - 1) / 2) for size in x]
        axes[0, 0].plot(x, [row.grpo for row in found], "--", color=colour, marker="o", markersize=4)
        axes[0, 0].plot(x, [row.oar for row in found], "-", color=colour, marker="o", markersize=4, label=each.name)
        if found[0].efficiency is not None:
            axes[0, 1].plot(x, [row.efficiency[0] for row in found], "--", color=colour, marker="o", markersize=4)  # type: ignore[index]
            axes[0, 1].plot(x, [row.efficiency[1] for row in found], "-", color=colour, marker="o", markersize=4)  # type: ignore[index]
        quartiles = np.array([np.quantile(row.ratios, [0.25, 0.5, 0.75]) for row in found]).T
        spread = [quartiles[1] - quartiles[0], quartiles[2] - quartiles[1]]
        axes[1, 0].errorbar(
            beside, quartiles[1], spread, color=colour, marker="o", markersize=4, linewidth=1, capsize=3
        )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[0, 0].set(yscale="log", ylabel="seconds a step", title="Time of a step (dashed: GRPO, solid: OAR)")
    axes[0, 1].set(ylabel="efficiency", ylim=(0, None), title="Efficiency (dashed: GRPO, solid: OAR)")
    axes[0, 1].axhline(1, color="0.6", linewidth=0.8)
    axes[1, 0].set(ylabel="OAR / GRPO", title="Ratio: median and quartiles of the rounds")
    axes[0, 0].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    _draw_limits(axes[1, 0], [found for _, found in series])
    for panel in (axes[0, 0], axes[0, 1], axes[1, 0]):
        panel.set(xscale="log", xlabel="processes")
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
    _draw_phases(axes[1, 1], result, [row.launch for row in _largest(series)])
    for panel in axes.flat:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(1, len(series))), frameon=False)
    if any(row.shared > 1 for _, found in series for row in found):
        figure.suptitle(
            "Processes share cores: times and efficiencies are no speed-up, the ratio is what is measured", fontsize=11
        )
    figure.savefig(path)
    plt.close(figure)
    return True


def _draw_limits(panel: Any, series: Sequence[list[Row]]) -> None:
    """What each first layout's ratio allows the others of its series, on a scale that does not make noise look large."""
    bases = {found[0].launch: found[0] for found in series}
    for base in bases.values():
        limit = base.ratio * (1 + ALLOWED)
        panel.axhline(limit, color="0.4", linewidth=0.8, linestyle=":")
        text = f"{1 + ALLOWED:g} x {base.launch.layout}"
        panel.annotate(
            text, (1, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7, color="0.4"
        )
    ratios = [row.ratio for found in series for row in found]
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, 0.9 * min(ratios)), max(high, 1.1 * max(ratios)))


def _largest(series: Sequence[tuple[Series, list[Row]]]) -> list[Row]:
    """The base and the largest of each series, without repetition."""
    chosen = [row for _, found in series for row in (found[0], found[-1])]
    return list({row.launch: row for row in chosen}.values())


def _draw_phases(panel: Any, result: Result, shown: Sequence[Launch]) -> None:
    """Bars of a step's phases over GRPO's step: GRPO's above, OAR's below, for each launch."""
    names = {"log_prob": "log-prob", "importance": "importance", "gate": "gate", "update": "update"}
    shades = {"log_prob": "#8da0cb", "importance": "#fc8d62", "gate": "#444444", "update": "#66c2a5"}
    ticks, labels, seen = [], [], set()
    for place, launch in enumerate(reversed(shown)):
        phases = _phases(result, launch)
        whole = sum(phases["grpo"].values())
        plain = phases["grpo"]["log_prob"]
        split = {
            "log_prob": plain,
            "importance": phases["oar"]["log_prob"] - plain,
            **{k: phases["oar"][k] for k in ("gate", "update")},
        }
        for offset, parts in ((0.2, phases["grpo"]), (-0.2, split)):
            left = 0.0
            for phase in names:
                width = parts.get(phase, 0.0) / whole
                label = names[phase] if phase not in seen and width else None
                panel.barh(place + offset, width, 0.36, left, color=shades[phase], label=label)
                seen |= {phase} if width else set()
                left += width
        ticks.append(place)
        labels.append(f"{launch.layout} ({launch.responses})")
    panel.set_yticks(ticks, labels, fontsize=8)
    panel.set(xlabel="of a GRPO step", title="Phases (upper bar: GRPO, lower: OAR)")
    panel.set_ylim(-1.4, len(shown) - 0.4)  # room for the legend
    panel.legend(fontsize=8, frameon=False, loc="lower left", ncols=4)
