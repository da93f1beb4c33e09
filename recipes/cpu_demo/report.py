"""The summary at the end of the demo, which claims no more than it can."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scipy.stats import binomtest

from benchmarks.tiny.words import WORDS
from oar_plugin.credit.answer import Segment
from oar_plugin.page.record import Response

CAVEAT = (
    "One seed, one small model, one made-up task: this shows that the whole path works and where OAR puts its weight. It does "
    "not show that OAR beats GRPO."
)

CURVES = {
    "Reward": ("critic/score/mean",),
    "Entropy of the policy, in nats per token": ("actor/entropy", "actor/entropy_loss"),
    "Response length, in tokens": ("response_length/mean",),
    "Variance of exact scores that predictions explain": ("oar/amortize/explained",),
    "Responses that fall back to GRPO (share)": ("oar/fallback/any",),
    "Seconds per step, without the first": ("timing_s/step",),
}
"""Title of a curve -> its metric in verl's log; where there are two, verl's versions name it differently."""
BY_POSITION = "oar/amortize/explained_by_position"


@dataclass(frozen=True)
class Share:
    """How many of how many, with Wilson's 95 % interval."""

    right: int
    total: int

    @property
    def value(self) -> float:
        return self.right / self.total

    def interval(self) -> tuple[float, float]:
        found = binomtest(self.right, self.total).proportion_ci(method="wilson")
        return float(found.low), float(found.high)

    def plain(self) -> dict[str, Any]:
        return {"right": self.right, "of": self.total, "interval_95": self.interval()}

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{100 * self.value:.0f} %  [{100 * low:.0f}, {100 * high:.0f}]"


@dataclass(frozen=True)
class Accuracy:
    """Held-out problems solved, sampling at temperature 1 and taking the most likely token."""

    sampled: Share
    greedy: Share

    def plain(self) -> dict[str, Any]:
        return {"sampled": self.sampled.plain(), "greedy": self.greedy.plain()}


@dataclass(frozen=True)
class MethodResult:
    """One trained method: its accuracy afterwards where it was measured, its metrics step by step, and what it cost."""

    accuracy: Accuracy | None
    metrics: Sequence[Mapping[str, Any]]
    seconds: float
    start_up_seconds: float
    peak_bytes: int

    def plain(self) -> dict[str, Any]:
        cost = {"seconds": self.seconds, "start_up_seconds": self.start_up_seconds, "peak_bytes": self.peak_bytes}
        return (self.accuracy.plain() if self.accuracy else {}) | cost


def weights_by_kind(responses: Sequence[Response]) -> dict[str, float]:
    """Mean weight of the reasoning tokens by what they are in the demo's task."""
    weights: dict[str, list[float]] = defaultdict(list)
    for row in (row for row in responses if row.status == "scored"):
        words = [token.strip() for token in row.tokens]
        for before, word, weight, segment in zip(["", *words], words, row.weights or (), row.segments, strict=False):
            if segment == Segment.REASONING:
                is_result = word.isdigit() and before == "="
                weights["results" if is_result else "filler words" if word in WORDS else "sums"].append(weight)
    return {kind: fmean(weights[kind]) for kind in ("results", "sums", "filler words") if weights[kind]}


def draw_curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Draws `CURVES` over the steps, a line per method, as one PNG. `metrics`: of each method, those of its steps."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 3).flat, CURVES.items(), strict=True):
        for method, rows in metrics.items():
            points = [(row["step"], row[name]) for row in rows for name in names if name in row]
            if names == ("timing_s/step",):
                points = points[1:]  # the first step still imports
            if points:
                axes.plot(*zip(*points, strict=True), label=method.upper())
            control = [(row["step"], row[BY_POSITION]) for row in rows if BY_POSITION in row]
            if control and names == ("oar/amortize/explained",):
                axes.plot(*zip(*control, strict=True), "--", label="position and probability alone")
                axes.legend()
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend()
    figure.savefig(file, dpi=120)


def print_summary(
    console: Console,
    before: Accuracy | None,
    results: Mapping[str, MethodResult],
    weights: Mapping[str, float],
    seconds: float,
    files: Mapping[str, Path],
) -> None:
    """The last thing the demo prints."""
    table = Table(box=box.SIMPLE_HEAD, title="Held-out problems solved, with 95 % interval", title_justify="left")
    table.add_column("")
    table.add_column("sampled", justify="right")
    table.add_column("greedy", justify="right")
    for method, accuracy in {"": before, **{name: result.accuracy for name, result in results.items()}}.items():
        if accuracy is not None:
            when = f"after {len(results[method].metrics)} steps of {method.upper()}" if method else "before"
            table.add_row(when, str(accuracy.sampled), str(accuracy.greedy), style="bold" if method == "oar" else "")
    lines = [
        f"{method.upper()}: mean reward {fmean(row['critic/score/mean'] for row in result.metrics):.2f}, "
        f"{median(row['timing_s/step'] for row in result.metrics):.1f} s a step, "
        f"{result.start_up_seconds:.0f} s for verl to start, {result.peak_bytes / 1024**3:.1f} GB of memory at most"
        for method, result in results.items()
    ]
    if weights:
        parts = ", ".join(f"{kind} [bold]{weight:.2f}[/]" for kind, weight in weights.items())
        lines.append(f"Mean weight of a token: {parts}. Only the results decide the answer.")
    console.print()
    if before is not None:
        console.print(table)
    console.print("\n".join([*lines, f"[dim]{CAVEAT}[/]"]))
    console.rule(f"done in {int(seconds) // 60}:{int(seconds) % 60:02d}", align="left", style="dim")
    for label, path in files.items():
        console.print(f"{label:<24}[cyan]{escape(str(path))}[/]")
    console.print(
        "\nNext\n"
        "  the same line in your own verl command   [bold]algorithm.adv_estimator=oar[/]\n"
        "  is my machine ready?                     [bold]oar doctor[/]\n"
        "  token weights of your own run            [bold]algorithm.oar.dump.dir=DIR[/], then [bold]oar inspect DIR[/]"
    )
