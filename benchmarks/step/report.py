"""What a run of `oar bench step` says: a table, a Markdown page, a JSON file, and a verdict for each target."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.machine import machine_line
from benchmarks.step.measure import (
    BOOKKEEPING,
    FUSED,
    FUSED_CKPT,
    LOG_PROB,
    ONLY,
    ONLY_CKPT,
    PUBLISHED,
    PUBLISHED_FROZEN,
    UPDATE,
    UPDATE_CKPT,
    Candidate,
    Result,
)
from benchmarks.step.passes import CHUNK
from benchmarks.targets import Target, target_lines
from benchmarks.targets import ratio as ratio_of


def targets(result: Result) -> list[Target]:
    """The ratios of a run, those with a target first of their kind."""
    settings, have = result.settings, result.candidates
    found: list[Target] = []

    def ratio(name: str, formula: str, of: Callable[..., float], keys: tuple[str, ...], **limit: Any) -> None:
        if not all(key in have for key in keys):
            return
        wall, cpu = ([getattr(have[key], kind) for key in keys] for kind in ("seconds", "cpu_seconds"))
        found.append(ratio_of(name, formula, of, wall, cpu if result.machine["device"] == "cpu" else None, **limit))

    every = None if settings.scored_share == 1 else "every response scored (--scored-share 1)"
    sized = None if (settings.responses, settings.response_length) == (64, 512) else "64 responses of 512 tokens"
    small = None if settings.size == "0.1b" else "0.1B parameters (--size 0.1b)"

    ratio(
        "importance adds, of a log-prob pass",
        "(b - a) / a",
        lambda a, b: (b - a) / a,
        (LOG_PROB, FUSED),
        limit=1.15,
        stated_for=every,
    )
    ratio(
        "same with activation checkpointing",
        "(b* - a) / a",
        lambda a, b: (b - a) / a,
        (LOG_PROB, FUSED_CKPT),
        limit=2.2,
        stated_for=every,
    )
    for ours, update, letter in ((FUSED, UPDATE, ""), (FUSED_CKPT, UPDATE_CKPT, "*")):
        if ours in have and update in have:
            ours_bytes, update_bytes = have[ours].peak_bytes, have[update].peak_bytes
            assert ours_bytes is not None
            assert update_bytes is not None
            of_mode = "with" if letter else "without"
            formula = f"mem(b{letter}) / mem(e{letter})"
            found.append(
                Target(
                    f"peak memory against the update's, {of_mode} checkpointing",
                    formula,
                    ours_bytes / update_bytes,
                    limit=1.0,
                )
            )
            found.append(
                Target(
                    "  same, the update's weight gradients not counted",
                    f"{formula} less gradients",
                    ours_bytes / (update_bytes - result.weight_bytes),
                )
            )
    ours = FUSED if FUSED in have else FUSED_CKPT
    letter = have[ours].letter
    for key in (PUBLISHED, PUBLISHED_FROZEN):
        d = have[key].letter
        ratio(
            f"{have[key].title}: time over ours, log-probs included in ours",
            f"{d} / {letter}",
            lambda d, b: d / b,
            (key, ours),
            limit=5.0,
            at_most=False,
            stated_for=sized,
        )
        ratio(
            "  over what importance adds in ours",
            f"{d} / ({letter} - a)",
            lambda d, b, a: d / (b - a) if b != a else math.nan,
            (key, ours, LOG_PROB),
        )
        ratio(
            "  log-probs and importance, both ways",
            f"(a + {d}) / {letter}",
            lambda d, b, a: (a + d) / b,
            (key, ours, LOG_PROB),
        )
    ratio("importance alone, of a log-prob pass", "c / a", lambda c, a: c / a, (ONLY, LOG_PROB))
    ratio("same with activation checkpointing", "c* / a", lambda c, a: c / a, (ONLY_CKPT, LOG_PROB))
    for ours, update, star in ((FUSED, UPDATE, ""), (FUSED_CKPT, UPDATE_CKPT, "*")):
        mode = " with checkpointing" if star else ""
        ratio(
            f"importance adds, of log-probs and update{mode}",
            f"(b{star} - a) / (a + e{star})",
            lambda a, b, e: (b - a) / (a + e),
            (LOG_PROB, ours, update),
        )
    ratio(
        "finder, gate and diagnostics, of a log-prob pass",
        "f / a",
        lambda f, a: f / a,
        (BOOKKEEPING, LOG_PROB),
        limit=0.03,
        stated_for=small,
    )
    return found


def notes(result: Result) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    settings = result.settings
    tokens = settings.responses * (settings.prompt_length + settings.response_length)
    counted = "by CUDA's allocator"
    if result.machine["device"] == "cpu":
        counted = "counted storage by storage, without scratch memory inside a kernel"
    lines = [
        f"{settings.architecture} with random weights, {result.parameters / 1e6:.1f}M parameters (tied embeddings "
        f"once), vocabulary {result.vocab}, {settings.dtype}; {settings.responses} responses of "
        f"{settings.response_length} tokens after prompts of {settings.prompt_length} ({tokens} tokens in all), "
        f"answers of {settings.answer_length} tokens, {settings.micro_batch} sequences a micro-batch; one process.",
        f"{settings.rounds - 1} counted rounds, each candidate once a round; a warm-up before them, on one "
        "micro-batch, is thrown away. Ratios are ratios of medians of wall seconds; the range beside them is over single "
        "rounds. On a CPU the same ratio of processor seconds stands beside it: it moves less when the machine is shared.",
        "All sequences have one length and attention is sdpa with a causal mask, so packing would change nothing here.",
        f"Log-probs and entropy are taken in chunks of {CHUNK} rows, in float32 (verl: "
        "entropy_from_logits_with_chunking). The update's log-prob writes its "
        "gradient over the logits (the leanest known); the update clips gradients and takes one AdamW step.",
        "Memory is the peak on top of weights and optimizer state, over two micro-batches (two responses in d), "
        f"{counted}.",
        "d runs the published procedure on the scored responses, one at a time, and lets backward compute weight "
        "gradients as the published code does; d' follows the paper's text and does not. Neither returns log-probs.",
    ]
    lines.append(f"Ours computes {settings.importance} in b and c; d computes OAR-G.")
    if settings.scored_share < 1:
        lines.append(
            f"Importance for {settings.scored} of {settings.responses} responses (--scored-share); b runs the others "
            "without a graph, c and d leave them out (the published code would score them too)."
        )
    for candidate in result.candidates.values():
        if candidate.scale > 1:
            lines.append(
                f"EXTRAPOLATED: {candidate.letter} was timed on {candidate.limit} responses, and its seconds were "
                f"multiplied by {candidate.scale:g}."
            )
    return lines


def table(result: Result) -> Table:
    """For the terminal."""
    shown = Table(title=f"oar bench step: {result.settings.size}, {result.machine['device']}")
    shown.add_column("")
    shown.add_column("what")
    for name in ("seconds", "fastest .. slowest", "of a", "peak MiB"):
        shown.add_column(name, justify="right", no_wrap=True)
    for candidate in result.candidates.values():
        shown.add_row(candidate.letter, candidate.title, *_cells(candidate, result))
    return shown


def _cells(candidate: Candidate, result: Result) -> tuple[str, str, str, str]:
    mark = " (extrapolated)" if candidate.scale > 1 else ""
    memory = "" if candidate.peak_bytes is None else f"{candidate.peak_bytes / 2**20:.0f}"
    return (
        f"{candidate.median:.4g}{mark}",
        f"{min(candidate.seconds):.4g} .. {max(candidate.seconds):.4g}",
        f"{candidate.median / result.seconds(LOG_PROB):.3g}",
        memory,
    )


def markdown(result: Result) -> str:
    """The report as a section of a page."""
    lines = [
        f"## {result.settings.size}, {result.settings.responses} x {result.settings.response_length}, "
        f"{result.settings.dtype}, {result.machine['device']}",
        "",
        machine_line(result.machine),
        "",
        "| | what | seconds | fastest .. slowest | CPU seconds | of a | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for candidate in result.candidates.values():
        seconds, spread, share, memory = _cells(candidate, result)
        cpu = statistics.median(candidate.cpu_seconds)
        lines.append(
            f"| {candidate.letter} | {candidate.title} | {seconds} | {spread} | {cpu:.4g} | {share} | {memory} |"
        )
    lines += ["", *target_lines(targets(result))]
    lines += ["", *(f"- {note}" for note in notes(result)), ""]
    return "\n".join(lines)


def to_json(result: Result) -> str:
    """Everything that was measured."""
    content = {
        "settings": asdict(result.settings),
        "machine": result.machine,
        "parameters": result.parameters,
        "weight_bytes": result.weight_bytes,
        "vocab": result.vocab,
        "candidates": [candidate.to_dict() for candidate in result.candidates.values()],
        "targets": [{**asdict(target), "verdict": target.verdict} for target in targets(result)],
        "notes": notes(result),
    }
    return json.dumps(content, indent=1)
