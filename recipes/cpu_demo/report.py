"""What the demo shows at its end: a curve, a page of weighted tokens, and a summary that claims no more than it can."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from oar_plugin.page.tokens import REASONING, TokenRow, token_row, tokens_page
from recipes.cpu_demo.task import WORDS

REWARD = "critic/score/mean"
STYLES = {"oar": ("OAR", "#0072B2", "-", "o"), "grpo": ("GRPO", "#D55E00", "--", "s")}
"""Label, colour (of Okabe and Ito's palette), line and marker of each method."""

CAVEAT = (
    "One seed, a model of half a million parameters, one made-up task: this shows that the whole path works and where "
    "OAR puts its weight. It does not show that OAR beats GRPO."
)


@dataclass(frozen=True)
class Share:
    """How many of how many."""

    right: int
    total: int

    @property
    def value(self) -> float:
        """The share itself."""
        return self.right / self.total

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval."""
        z, n, p = 1.96, self.total, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{100 * self.value:.0f} %  [{100 * low:.0f}, {100 * high:.0f}]"


@dataclass(frozen=True)
class Accuracy:
    """Held-out problems solved, sampling at temperature 1 and taking the most likely token."""

    sampled: Share
    greedy: Share


@dataclass(frozen=True)
class MethodResult:
    """One trained method: its accuracy afterwards, its metrics step by step, and what it cost."""

    accuracy: Accuracy
    metrics: Sequence[Mapping[str, Any]]
    seconds: float
    start_up_seconds: float
    peak_bytes: int


def draw_curve(path: Path, before: Accuracy, results: Mapping[str, MethodResult]) -> None:
    """Reward of each training step, and held-out accuracy before and after with its 95 % interval."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.6), dpi=140, layout="constrained")
    for place, (name, result) in enumerate(results.items()):
        label, colour, line, marker = STYLES[name]
        steps = [row["step"] for row in result.metrics]
        rewards = [row[REWARD] for row in result.metrics]
        axes.plot(steps, rewards, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(rewards), line, color=colour, linewidth=2.2, label=f"{label}: reward in training")
        low, high = result.accuracy.sampled.interval()
        axes.errorbar(
            [max(steps) + 1 + 0.6 * place], [(low + high) / 2], yerr=[[(high - low) / 2]], fmt="none", color=colour,
            capsize=4,
        )  # fmt: skip
        axes.plot(
            [max(steps) + 1 + 0.6 * place], [result.accuracy.sampled.value], marker, color=colour, markersize=7,
            label=f"{label}: held-out, sampled", linestyle="none",
        )  # fmt: skip
    low, high = before.sampled.interval()
    axes.errorbar([0], [(low + high) / 2], yerr=[[(high - low) / 2]], fmt="none", color="#333333", capsize=4)
    axes.plot(
        [0], [before.sampled.value], "D", color="#333333", markersize=6, label="before training, held-out, sampled"
    )
    axes.set(
        xlabel="training step", ylabel="share of right answers", ylim=(0, 1),
        title="Four sums modulo 10, one seed (thin: each batch, bold: mean of five)",
    )  # fmt: skip
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean of the last ``width`` values."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def load_rows(folder: Path) -> list[TokenRow]:
    """Every response that a run dumped into ``algorithm.oar.dump_dir``, by step."""
    files = sorted(folder.glob("step_*.jsonl"))
    return [token_row(json.loads(line)) for file in files for line in file.read_text().splitlines()]


def write_tokens_page(path: Path, rows: Sequence[TokenRow], steps: int = 3, per_step: int = 4) -> None:
    """The page of the first, the last and some steps between, with raised and lowered responses side by side."""
    known = sorted({row.step for row in rows})
    chosen = {known[round(i * (len(known) - 1) / max(1, steps - 1))] for i in range(steps)} if known else set()
    shown: list[TokenRow] = []
    for step in sorted(chosen):
        here = [row for row in rows if row.step == step]
        raised = [row for row in here if row.advantage > 0]
        lowered = [row for row in here if row.advantage <= 0]
        half = max(per_step // 2, per_step - len(lowered))
        shown += (raised[:half] + lowered[: per_step - len(raised[:half])])[:per_step]
    path.write_text(tokens_page(shown, "Where OAR put the weight"), encoding="utf-8")


def weights_by_kind(rows: Sequence[TokenRow]) -> dict[str, float]:
    """Mean weight of the reasoning tokens by what they are in the demo's task."""
    found: dict[str, list[float]] = {"results": [], "sums": [], "filler words": []}
    for row in rows:
        if row.status != "scored":
            continue
        words = [token.strip() for token in row.tokens]
        for place, (word, weight, segment) in enumerate(zip(words, row.weights, row.segments, strict=True)):
            if segment != REASONING:
                continue
            is_result = word.isdigit() and place > 0 and words[place - 1] == "="
            found["results" if is_result else "filler words" if word in WORDS else "sums"].append(weight)
    return {kind: fmean(weights) for kind, weights in found.items() if weights}


def print_summary(
    console: Console,
    before: Accuracy,
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
    table.add_row("before", str(before.sampled), str(before.greedy))
    for name, result in results.items():
        table.add_row(
            f"after {len(result.metrics)} steps of {STYLES[name][0]}",
            str(result.accuracy.sampled),
            str(result.accuracy.greedy),
            style="bold" if name == "oar" else "",
        )
    console.print()
    console.print(table)
    for name, result in results.items():
        step = median(row["timing_s/step"] for row in result.metrics)
        console.print(
            f"{STYLES[name][0]}: {step:.1f} s a step, {result.start_up_seconds:.0f} s for verl to start, "
            f"{result.peak_bytes / 1024**3:.1f} GB of memory at most",
            highlight=False,
        )
    if weights:
        parts = ", ".join(f"{kind} [bold]{weight:.2f}[/]" for kind, weight in weights.items())
        console.print(f"Mean weight of a token: {parts}. Only the results decide the answer.", highlight=False)
    console.print(f"[dim]{CAVEAT}[/]")
    console.rule(f"done in {int(seconds) // 60}:{int(seconds) % 60:02d}", align="left", style="dim")
    for label, path in files.items():
        console.print(
            f"{label:<24}[cyan]{path}[/]", highlight=False, soft_wrap=True
        )  # paths in one piece, to be copied
    console.print()
    console.print(
        "Next\n"
        "  the same line in your own verl command   [bold]algorithm.adv_estimator=oar[/]\n"
        "  is my machine ready?                     [bold]oar doctor[/]\n"
        "  token weights of your own run            [bold]algorithm.oar.dump_dir=DIR[/], then [bold]oar inspect DIR[/]",
        highlight=False,
    )
