"""What `oar bench run` says: tables, a Markdown page, a JSON file, a plot, and a verdict on the whole-step ratio."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.machine import machine_line
from benchmarks.plots import pyplot
from benchmarks.run.measure import Phases, Result, Settings, Step, median_interval, median_ratio
from benchmarks.run.steps import WARM_UP

LIMIT = 1.10
"""Target: a whole OAR step over a whole GRPO step, with the default importance and half of the rows without an advantage."""

_STATED_FOR = (Settings.importance, Settings.scored_share)
_TITLES = {
    "generation": "generation",
    "log_probs": "log-probs",
    "importance": "importance",
    "advantage": "advantage",
    "update": "update",
    "weight_sync": "weight sync",
    "rest": "rest",
}
_COLOURS = ("#4c78a8", "#72b7b2", "#e45756", "#b279a2", "#f58518", "#54a24b", "#bab0ac")
_COLUMNS = ("phase", "GRPO, s", "share", "OAR, s", "share", "OAR adds, s", "of GRPO's step")


@dataclass(frozen=True)
class Ratio:
    """OAR over GRPO.

    Attributes:
        name: of what.
        value: median over pairs of steps.
        interval: of the median, at 95 %; None with fewer than six pairs.
        pairs: how many.
    """

    name: str
    value: float
    interval: tuple[float, float] | None
    pairs: int

    @property
    def interval_text(self) -> str:
        """The interval in words."""
        return "too few pairs" if self.interval is None else f"{self.interval[0]:.3f} .. {self.interval[1]:.3f}"


def ratios(result: Result) -> list[Ratio]:
    """The whole step's ratio in wall seconds first, then what supports it."""
    pairs = result.pairs()
    found = [_ratio("whole step, wall seconds", [(grpo.seconds, oar.seconds) for grpo, oar in pairs])]
    usual = statistics.median(grpo.seconds for grpo, _ in pairs)
    touched = [(usual, usual + _touched(oar) - _touched(grpo)) for grpo, oar in pairs]
    found.append(_ratio("same, by the phases that OAR changes", touched))
    metered = [
        (grpo.cpu_seconds, oar.cpu_seconds)
        for grpo, oar in pairs
        if grpo.cpu_seconds is not None and oar.cpu_seconds is not None
    ]
    if metered:
        found.append(_ratio("whole step, processor seconds of all processes", metered))
    return found


def _touched(step: Step) -> float:
    """Seconds of the phases in which an OAR step does anything else than a GRPO step."""
    return step.phases.log_probs + step.phases.importance + step.phases.advantage


def _ratio(name: str, pairs: list[tuple[float, float]]) -> Ratio:
    return Ratio(name, median_ratio(pairs), median_interval([oar / grpo for grpo, oar in pairs]), len(pairs))


def verdict(result: Result) -> str:
    """On the ratio of wall seconds: `reached`, `NOT reached`, or why there is none."""
    ratio = ratios(result)[0]
    if (result.settings.importance, result.settings.scored_share) != _STATED_FOR:
        return "not judged: the target is stated for --importance {} --scored-share {}".format(*_STATED_FOR)
    if ratio.interval is None:
        return "not judged: fewer than six pairs of steps (--steps, --rounds)"
    low, high = ratio.interval
    if high <= LIMIT:
        return "reached"
    return "NOT reached" if low > LIMIT else f"not judged: the interval holds {LIMIT:.2f} (more --steps or --rounds)"


@dataclass(frozen=True)
class PhaseRow:
    """One phase of a step: medians in seconds.

    Attributes:
        title: of the phase.
        grpo: its seconds in GRPO's steps.
        grpo_share: of GRPO's median step.
        oar: its seconds in OAR's steps.
        oar_share: of OAR's median step.
        added: the median over pairs of the difference.
        added_share: the same, of GRPO's median step.
    """

    title: str
    grpo: float
    grpo_share: float
    oar: float
    oar_share: float
    added: float
    added_share: float

    def cells(self) -> list[str]:
        return [
            self.title,
            f"{self.grpo:.3f}",
            f"{self.grpo_share:.1%}",
            f"{self.oar:.3f}",
            f"{self.oar_share:.1%}",
            f"{self.added:+.3f}",
            f"{self.added_share:+.1%}",
        ]


def phase_rows(result: Result) -> list[PhaseRow]:
    """Every phase, and the whole step last. Medians of parts need not add up to the median of the whole."""

    def row(title: str, seconds: dict[int, float]) -> PhaseRow:
        grpo = statistics.median(seconds[id(step)] for step in result.of(oar=False))
        oar = statistics.median(seconds[id(step)] for step in result.of(oar=True))
        added = statistics.median(seconds[id(o)] - seconds[id(g)] for g, o in result.pairs())
        return PhaseRow(title, grpo, grpo / whole[0], oar, oar / whole[1], added, added / whole[0])

    whole = tuple(statistics.median(step.seconds for step in result.of(oar)) for oar in (False, True))
    rows = [
        row(_TITLES[name], {id(step): getattr(step.phases, name) for step in result.steps}) for name in Phases.names()
    ]
    return [*rows, row("whole step", {id(step): step.seconds for step in result.steps})]


def notes(result: Result) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    settings = result.settings
    lines = [
        f"qwen2 with random weights, {result.parameters / 1e6:.1f}M parameters (tied embeddings once), vocabulary "
        f"{result.vocabulary}, float32; {settings.prompts} prompts a step, {settings.n} responses each, prompts of "
        f"{settings.prompt_length} and responses of exactly {settings.response_length} tokens (ignore_eos), the last eight of "
        f"which count as the answer; {settings.micro_batch} sequences a micro-batch, activation checkpointing "
        f"{settings.checkpointing}.",
        f"verl {result.machine['verl']}, vLLM {result.machine['vllm']}, FSDP2 with one worker; a thread in each of verl's "
        "processes. Actor, engine and trainer take turns (trainer_mode=sync).",
        "GRPO's and OAR's steps take turns within a run, in the order GRPO OAR OAR GRPO, so that whatever slows down the "
        "machine slows down both; neighbours are a pair. Runs of verl: "
        f"{settings.rounds}, with {settings.steps} counted steps of each method, after {WARM_UP} that are thrown away. In a "
        "GRPO step the trainer calls verl's own methods and the actor gets no request.",
        "The learning rate is 0: the update does all its work, and both methods see the same model. Rewards do not depend on "
        f"the text: {settings.scored_share:.0%} of the prompts have responses of unequal rewards. Checked in every step: "
        "lengths, mean reward, and that OAR scored exactly that share of the rows (`oar/scored`).",
        f"OAR's importance is `{settings.importance}`. Its row is verl's `timing_s/oar` (marking rows, the backward, the "
        "gate); log-probs are what is left of `old_log_prob`, in OAR's steps a forward that keeps a graph. `rest` is "
        "`timing_s/step` less all others.",
        "Ratios and `OAR adds` are medians over pairs. The interval is that of the median at 95 %, from the sign test: it "
        "assumes nothing about how times are distributed. Processor seconds are those of all processes from one step's end "
        "to the next one's, with verl's bookkeeping between steps.",
        "Generation, update and weight sync do the same work in both methods, so what differs there is the machine's. The "
        "second ratio leaves it out: a median GRPO step plus what OAR adds to log-probs, importance and advantage, over that "
        "step.",
    ]
    if result.control:
        alone = statistics.median(step.seconds for step in result.control)
        inside = statistics.median(step.seconds for step in result.of(oar=False))
        lines.append(
            f"Control: {len(result.control)} steps of a run of GRPO alone, with verl's own trainer, after all others: "
            f"{alone:.3f} s a step, {alone / inside:.2f} of GRPO's steps beside OAR's. Not interleaved, so it moves with the "
            "machine."
        )
    return lines


def tables(result: Result) -> list[Table]:
    """For the terminal."""
    settings = result.settings
    title = f"oar bench run: {settings.size}, {settings.responses} x {settings.response_length}, {settings.importance}"
    phases = Table(title=f"{title}, seconds a step (medians)")
    for index, name in enumerate(_COLUMNS):
        phases.add_column(name, justify="right" if index else "left", no_wrap=not index)
    rows = phase_rows(result)
    for row in rows:
        phases.add_row(*row.cells(), end_section=row is rows[-2])
    whole = Table(title="OAR / GRPO")
    for name in ("what", "ratio", "95 % interval", "pairs", "target", "verdict"):
        whole.add_column(name)
    for index, ratio in enumerate(ratios(result)):
        judged = (f"<= {LIMIT:.2f}", _coloured(verdict(result))) if index == 0 else ("", "for information")
        whole.add_row(ratio.name, f"{ratio.value:.3f}", ratio.interval_text, str(ratio.pairs), *judged)
    return [phases, whole]


def _coloured(text: str) -> str:
    return f"[{ {'reached': 'green', 'NOT reached': 'red'}.get(text, 'dim') }]{text}[/]"


def markdown(result: Result, plot: str | None = None) -> str:
    """The report as a page; `plot` is the file name of its plot."""
    settings = result.settings
    lines = [
        "# What OAR costs in whole runs of verl",
        "",
        machine_line(result.machine),
        "",
        f"## {settings.size}, {settings.responses} x {settings.response_length}, {settings.importance}, "
        f"{settings.scored_share:.0%} of the rows scored",
        "",
        "| OAR / GRPO | ratio | 95 % interval | pairs | target | |",
        "|---|---|---|---|---|---|",
    ]
    for index, ratio in enumerate(ratios(result)):
        judged = f"<= {LIMIT:.2f} | {verdict(result)}" if index == 0 else " | for information"
        lines.append(f"| {ratio.name} | {ratio.value:.3f} | {ratio.interval_text} | {ratio.pairs} | {judged} |")
    lines += ["", f"| {' | '.join(_COLUMNS)} |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in phase_rows(result)]
    if plot is not None:
        lines += ["", f"![seconds of each phase, and the ratio of each pair of steps]({plot})"]
    return "\n".join([*lines, "", "## How to read it", "", *(f"- {note}" for note in notes(result)), ""])


def to_json(result: Result) -> str:
    """Everything that was measured."""
    content = {
        "settings": asdict(result.settings),
        "machine": result.machine,
        "parameters": result.parameters,
        "vocabulary": result.vocabulary,
        "ratios": [asdict(ratio) for ratio in ratios(result)],
        "target": {"limit": LIMIT, "verdict": verdict(result)},
        "phases": [asdict(row) for row in phase_rows(result)],
        "steps": [asdict(step) for step in result.steps],
        "control": [asdict(step) for step in result.control],
        "notes": notes(result),
    }
    return json.dumps(content, indent=1)


def draw(path: Path, result: Result) -> bool:
    """Stacked bars of the phases, and the ratio of each pair; False without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False

    settings, rows, ratio = result.settings, phase_rows(result)[:-1], ratios(result)[0]
    figure, (bars, dots) = plt.subplots(2, 1, figsize=(8, 5.6), dpi=140, layout="constrained", height_ratios=(1, 1.15))
    # Medians of parts, drawn to the sum that they have; the table has the median of the whole step.
    left = [0.0, 0.0]
    for row, colour in zip(rows, _COLOURS, strict=True):
        bars.barh(("GRPO", "OAR"), (row.grpo, row.oar), left=left, color=colour, label=row.title, height=0.6)
        for place, seconds in enumerate((row.grpo, row.oar)):
            if seconds > 0.06 * sum(other.oar for other in rows):
                bars.text(
                    left[place] + seconds / 2, place, f"{seconds:.2f}", ha="center", va="center", color="w", fontsize=8
                )
        left = [left[0] + row.grpo, left[1] + row.oar]
    bars.invert_yaxis()
    bars.set(xlabel="seconds a step, median of each phase")
    bars.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(rows), frameon=False, fontsize=8, columnspacing=1.2
    )

    values = [oar.seconds / grpo.seconds for grpo, oar in result.pairs()]
    places = range(1, len(values) + 1)
    if ratio.interval is not None:
        dots.axhspan(*ratio.interval, color=_COLOURS[0], alpha=0.15, lw=0, label="95 % interval of the median")
    dots.axhline(ratio.value, color=_COLOURS[0], lw=1.5, label=f"median {ratio.value:.3f}")
    dots.axhline(1.0, color="#999999", lw=0.8)
    dots.axhline(LIMIT, color="#e45756", ls="--", lw=1, label=f"target {LIMIT:.2f}")
    dots.plot(places, values, "o", color="#333333", markersize=4)
    for place, (pair, before) in enumerate(zip(result.pairs()[1:], result.pairs(), strict=False), start=2):
        if pair[0].run != before[0].run:
            dots.axvline(place - 0.5, color="#999999", lw=0.8, ls=":")
    dots.set(xlabel="pair of steps (dotted: the next run of verl)", ylabel="OAR / GRPO, whole step")
    dots.xaxis.get_major_locator().set_params(integer=True)
    dots.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)
    for axes in (bars, dots):
        axes.spines[["top", "right"]].set_visible(False)
    dots.grid(axis="y", alpha=0.25)
    figure.suptitle(
        f"verl on a CPU: {settings.size}, {settings.responses} responses of {settings.response_length} tokens, "
        f"{settings.importance}, {settings.scored_share:.0%} of the rows scored",
        fontsize=10,
    )
    figure.savefig(path)
    plt.close(figure)
    return True
