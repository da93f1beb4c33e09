"""What a run of `oar bench perturbation` says: tables, a Markdown page, a JSON file, a plot, a verdict for each target."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import machine_line
from benchmarks.offload.beside import DEFAULT_SHARE, MOST_TOKENS, Beside
from benchmarks.offload.engine import BLOCK_SIZE, MAX_REQUESTS, STEP_TOKENS
from benchmarks.offload.measure import (
    COMPARED_COPIES,
    EXACT,
    GENERATE,
    LETTERS,
    LOCAL,
    LOCAL_HYBRID,
    LOG_PROB,
    OFFLOADED,
    OFFLOADED_BUDGET,
    PUBLISHED,
    STEP,
    UPDATE,
    LengthResult,
    Measured,
    Result,
)
from benchmarks.offload.scoring import BUDGET, FORWARD_TOKENS, SPAN
from benchmarks.plots import pyplot
from benchmarks.targets import Target, ratio, target_lines, target_table
from oar_plugin.config import PerturbationConfig
from oar_plugin.hosts.vllm.versions import unsupported

_PARTS = (GENERATE, LOG_PROB, UPDATE)

_COLUMNS = ("s / response", "fastest .. slowest", "copies", "tokens", "of g", "of p", "of exact")
_BESIDE_COLUMNS = ("generation", "tokens / s", "fastest .. slowest", "of alone", "copies meanwhile", "copies / s")


def targets(length: LengthResult) -> list[Target]:
    """The ratios of one response length; those that need an engine are left out without one."""
    have = length.candidates
    found: list[Target] = []

    def quotient(name: str, above: str, below: str, **limit: Any) -> None:
        if above in have and below in have:
            formula = f"{LETTERS[above]} / {LETTERS[below]}"
            series = (have[above].seconds, have[below].seconds)
            found.append(ratio(name, formula, lambda a, b: a / b, series, **limit))

    quotient("published over exact on the engine", PUBLISHED, OFFLOADED, limit=3.0, at_most=False)
    quotient("published over exact in the actor", PUBLISHED, LOCAL)
    quotient("30 % by gradient, of exact in the actor", LOCAL_HYBRID, LOCAL, limit=0.4)
    quotient("30 % by blocks, of exact on the engine", OFFLOADED_BUDGET, OFFLOADED, limit=0.4)
    quotient("exact on the engine, of a GRPO step", OFFLOADED, STEP)
    alone = next((beside for beside in length.beside if beside.share is None), None)
    for beside in length.beside:
        if alone is not None and beside.share is not None:
            default = beside.share == DEFAULT_SHARE
            found.append(
                ratio(
                    f"generation beside scoring, share {beside.share:g}",
                    f"t/s({beside.share:g}) / t/s(alone)",
                    lambda a, b: a / b,
                    (beside.rates, alone.rates),
                    limit=0.85 if default else None,
                    at_most=False,
                )
            )
    return found


def notes(result: Result) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    settings = result.settings
    defaults = PerturbationConfig()
    lines = [
        f"{settings.architecture} with random weights, {result.parameters / 1e6:.1f}M parameters (tied embeddings once), "
        f"vocabulary {settings.vocabulary}, {settings.dtype}; {settings.responses} responses after prompts of "
        f"{settings.prompt_length} tokens, with answers of {settings.answer_length}.",
        f"{settings.rounds} rounds, each candidate once a round, after a short warm-up. Seconds are wall seconds of all "
        "responses over their number; ratios are ratios of medians, the range beside them is over single rounds.",
        "g is what GRPO does with these responses: they are generated (all at once; a larger batch makes generation cheaper a "
        "response), then one forward for log-probs, then the update with one AdamW step.",
        "p replaces every reasoning token in turn by the padding token and runs whole sequences, with float32 logits of all "
        "positions and no cache. What follows the answer is cut off. Copies in one forward: "
        + ", ".join(f"{length.at_once} at {length.response_length} tokens" for length in result.lengths)
        + (" (--published-copies)" if settings.published_copies else " (what half of the free memory holds, or all)")
        + ".",
        f"l runs at most {FORWARD_TOKENS} tokens a forward, one response after the other. l30 is `hybrid`, with "
        f"{BUDGET:.0%} of the copies; its seconds have the gradient pass in them, its tokens do not. l8 and o8 replace "
        f"{SPAN} tokens at a time.",
        "Tokens are those that were computed, the clean reference included, without what a prefix cache supplied.",
    ]
    if result.machine["vllm"] is None:
        lines.append(
            "vLLM is NOT installed: nothing was measured on an engine, g has no generation in it, and its ratios are too large."
        )
    else:
        lines += [
            f"vLLM {result.machine['vllm']}: AsyncLLM, one worker with {settings.threads} threads, prefix cache in blocks of "
            f"{BLOCK_SIZE}, priority scheduling, at most {MAX_REQUESTS} requests and {STEP_TOKENS} tokens a step, "
            f"not compiled on a CPU; at most {defaults.max_in_flight} copies in flight. PyTorch has as many threads; neither "
            "is bound to cores. Engine and PyTorch are never timed at once: while PyTorch was, the engine's processes used "
            f"{result.engine_busy:.3f} processor seconds a second.",
            f"Generation beside scoring: {settings.generating} requests begin together, each of as many tokens as the response "
            f"has but at most {MOST_TOKENS}, while responses are scored over and over; measured from the first to the end of "
            "the last. Copies meanwhile are work that is then no longer to be done (references included). The default share "
            f"is {DEFAULT_SHARE:g}; 1 does not limit time.",
        ]
        if (warning := unsupported(result.machine["vllm"])) is not None:
            lines.append(warning)
    for length in result.lengths:
        agreed = ", ".join(f"{LETTERS[key]} {value:.1g}" for key, value in length.disagreement.items())
        lines.append(
            f"Compared at {length.response_length} tokens before anything was timed, up to {COMPARED_COPIES} copies of one "
            f"response: difference from l over the largest score: {agreed}."
        )
        scaled = [c for c in length.candidates.values() if c.measured < 1]
        if scaled:
            text = ", ".join(f"{c.letter} {c.copies * c.measured:.0f} of {c.copies:.0f}" for c in scaled)
            lines.append(
                f"SCALED UP at {length.response_length} tokens (--copies-at-most {settings.copies_at_most}): evenly spaced "
                f"copies of each response were run, and seconds, copies and tokens multiplied: {text}."
            )
        retried = [f"{c.letter} {c.retried}" for c in length.candidates.values() if c.retried]
        if retried:
            lines.append(f"Requests made twice at {length.response_length} tokens, all rounds: {', '.join(retried)}.")
    return lines


def tables(result: Result) -> list[Table]:
    """For the terminal: two or three a response length."""
    shown = []
    for length in result.lengths:
        what = f"{result.settings.size}, {length.response_length} tokens, {result.machine['device']}"
        table = Table("", "what", title=f"oar bench perturbation: {what}")
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for candidate in length.candidates.values():
            table.add_row(candidate.letter, candidate.title, *_cells(candidate, length))
        shown.append(table)
        if length.beside:
            beside_table = Table(title="generation beside scoring")
            for name in _BESIDE_COLUMNS:
                beside_table.add_column(name, justify="left" if name == _BESIDE_COLUMNS[0] else "right")
            for beside in length.beside:
                beside_table.add_row(*_beside_cells(beside, length))
            shown.append(beside_table)
        shown.append(target_table(targets(length), f"ratios and targets, {length.response_length} tokens"))
    return shown


def _cells(candidate: Measured, length: LengthResult) -> list[str]:
    have = length.candidates
    mark = " (scaled)" if candidate.measured < 1 else ""
    of = [have[STEP], have.get(PUBLISHED), have.get(EXACT.get(candidate.key, ""))]
    if candidate.key in (STEP, *_PARTS):
        of[1] = None
    return [
        f"{candidate.median:.4g}{mark}",
        f"{min(candidate.seconds):.3g} .. {max(candidate.seconds):.3g}",
        f"{candidate.copies:.0f}" if candidate.copies else "",
        f"{candidate.tokens:.0f}" if candidate.copies else "",
        *("" if other is None else f"{candidate.median / other.median:.3g}" for other in of),
    ]


def _beside_cells(beside: Beside, length: LengthResult) -> list[str]:
    name = "alone" if beside.share is None else f"scoring, share {beside.share:g}"
    if beside.share == DEFAULT_SHARE:
        name += " (default)"
    return [
        name,
        f"{beside.rate:.4g}",
        f"{min(beside.rates):.4g} .. {max(beside.rates):.4g}",
        f"{beside.rate / length.beside[0].rate:.3g}",
        "" if beside.share is None else f"{sum(beside.copies) / len(beside.copies):.0f}",
        "" if beside.share is None else f"{beside.copy_rate:.3g}",
    ]


def markdown(result: Result, plot: str | None = None) -> str:
    """The report as a page; `plot` is the file name of its plot."""
    settings = result.settings
    lines = ["# What counterfactual masking costs", "", machine_line(result.machine), ""]
    if plot is not None:
        lines += [f"![seconds a response against its length]({plot})", ""]
    for length in result.lengths:
        lines += [
            f"## {settings.size}, {settings.responses} x {length.response_length}, {settings.dtype}, "
            f"{result.machine['device']}",
            "",
            *_markdown_table(
                ("", "what", *_COLUMNS),
                [[c.letter, c.title.strip(), *_cells(c, length)] for c in length.candidates.values()],
            ),
            "",
        ]
        if length.beside:
            lines += [
                *_markdown_table(_BESIDE_COLUMNS, [_beside_cells(beside, length) for beside in length.beside]),
                "",
            ]
        lines += [*target_lines(targets(length)), ""]
    return "\n".join([*lines, "## How to read it", "", *(f"- {note}" for note in notes(result)), ""])


def _markdown_table(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def to_json(result: Result) -> str:
    """Everything that was measured."""
    content = {
        "settings": asdict(result.settings),
        "machine": result.machine,
        "parameters": result.parameters,
        "engine_processor_seconds_a_second_of_torch": result.engine_busy,
        "lengths": [
            {
                "response_length": length.response_length,
                "published_copies_at_once": length.at_once,
                "disagreement": length.disagreement,
                "candidates": [
                    {**asdict(c), "letter": c.letter, "median_seconds": c.median} for c in length.candidates.values()
                ],
                "generation_beside_scoring": [{**asdict(beside), "rate": beside.rate} for beside in length.beside],
                "targets": [{**asdict(target), "verdict": target.verdict} for target in targets(length)],
            }
            for length in result.lengths
        ],
        "notes": notes(result),
    }
    return json.dumps(content, indent=1)


def draw(path: Path, result: Result) -> bool:
    """Seconds a response against its length, one line a candidate; False without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False

    figure, axes = plt.subplots(figsize=(7, 6), dpi=140, layout="constrained")
    lengths = [length.response_length for length in result.lengths]
    for key, shown in result.lengths[0].candidates.items():
        if key in _PARTS:
            continue
        seconds = [length.candidates[key].median for length in result.lengths]
        line = "--" if key in EXACT and EXACT[key] != key else "-"
        title = shown.title if key in (STEP, PUBLISHED, *EXACT.values()) else shown.title.removeprefix("same, ")
        axes.plot(lengths, seconds, line, marker="o", markersize=4, label=f"{shown.letter}: {title}")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="response length, tokens",
        ylabel="seconds a response",
        title=f"{result.settings.size}, {result.machine['device']}, {result.settings.dtype}",
    )
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)
    return True
