"""Every candidate of a training step, measured side by side in one process.

Round by round each candidate takes the whole batch once, so that a machine that slows down slows all of them. Memory is
measured last, on two micro-batches a candidate: by the second, the update holds its gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from benchmarks.importance import DEFAULT, check_importance
from benchmarks.machine import Device, check_device, choose_device, describe_machine, load_average, timed
from benchmarks.memory import peak_bytes
from benchmarks.ratios import Ratio, ratio_table
from benchmarks.report import Report, Table
from benchmarks.step.passes import CHUNK, Passes
from benchmarks.study import Progress, check_at_least_one, silent
from benchmarks.tiny.random_models import SHAPES, build_batch, build_model
from oar_plugin.config import OarConfig
from oar_plugin.passes.request import Request

TITLES = {
    "a": "log-prob forward",
    "b": "log-probs + importance, fused",
    "b*": "same, activation checkpointing",
    "c": "importance alone",
    "c*": "same, activation checkpointing",
    "d": "published OAR-G, as its code",
    "d'": "published OAR-G, weights frozen",
    "e": "actor update",
    "e*": "same, activation checkpointing",
    "f": "answer finder, gate, diagnostics",
}

PUBLISHED_SECONDS = 60.0
"""Longest that the published procedure may take in one round before a part of the responses is timed and scaled up."""


@dataclass(frozen=True)
class Settings:
    size: str = "0.1b"
    """Parameters of the model, about: tiny, 1m, 10m, 50m, 0.1b, 0.5b, 1.5b, 7b."""
    responses: int = 64
    """Sequences."""
    response_length: int = 512
    """Tokens of each response."""
    prompt_length: int = 128
    """Tokens before it."""
    answer_length: int = 8
    """Tokens in the box."""
    micro_batch: int = 4
    """Sequences at a time."""
    scored_share: float = 1.0
    """Share of the responses that get importance: those whose group has a non-zero advantage."""
    importance: str = DEFAULT
    """Of b and c: any without masked copies, or python:MODULE:CLASS."""
    checkpointing: Literal["on", "off", "both"] = "both"
    """Candidates with activation checkpointing, without it, or both."""
    rounds: int = 6
    """Counted rounds, after a short warm-up; verdicts need six."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation."""
    device: Device = "auto"
    """auto takes CUDA where there is one."""
    out: Path | None = None
    """Write step_DEVICE_SIZE.md and .json into this folder (default: only the terminal)."""

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        if self.size not in SHAPES:
            raise ValueError(f"--size {self.size}: allowed: {', '.join(SHAPES)}")
        lengths = ("response_length", "prompt_length", "answer_length")
        check_at_least_one(self, "responses", "micro_batch", "rounds", *lengths)
        if not 0 < self.scored_share <= 1:
            raise ValueError(f"--scored-share {self.scored_share}: must be in (0, 1]")
        check_importance(self.importance)
        check_device(self.device)

    @property
    def scored(self) -> int:
        """How many responses get importance."""
        return max(1, round(self.responses * self.scored_share))


Work = Callable[[int | None], object]
"""Takes the `limit` of `Passes`."""


@dataclass(frozen=True)
class Figures:
    """What was measured of each candidate, by letter: a row a round, peaks in one row (bytes on top of what is always there).

    `timed_on`: responses that d was timed on; its seconds are scaled up to all that are scored.
    """

    seconds: pd.DataFrame
    cpu_seconds: pd.DataFrame
    peaks: pd.DataFrame
    timed_on: Mapping[str, int]


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Build the model and run every candidate.

    Raises:
        ValueError: settings that cannot work.
    """
    settings.check()
    progress("building the model")
    device = choose_device(settings.device)
    machine = describe_machine(device)
    passes = build_passes(settings, device)
    works = works_of(passes, settings)
    pieces = [(number, letter) for number in range(settings.rounds + 2) for letter in works]
    seconds, cpu_seconds, peaks, timed_on = defaultdict(list), defaultdict(list), {}, dict[str, int]()
    for done, (number, letter) in enumerate(pieces):
        work = works[letter]
        name = {0: "warm-up", settings.rounds + 1: "memory"}.get(number, f"round {number} of {settings.rounds}")
        progress(f"{name}: {TITLES[letter]}", done, len(pieces))
        if name == "warm-up":
            work(1)
            if letter in ("d", "d'"):
                one, _ = timed(partial(work, 1), device)
                timed_on[letter] = min(max(2, int(PUBLISHED_SECONDS / one)), settings.scored)
        elif name == "memory":
            if letter != "f":
                peaks[letter] = [peak_bytes(partial(work, 2), device)]
        else:
            wall, cpu = timed(partial(work, timed_on.get(letter)), device)
            scale = settings.scored / timed_on.get(letter, settings.scored)
            seconds[letter].append(wall * scale)
            cpu_seconds[letter].append(cpu * scale)
    machine["load_average_after"] = load_average()
    weights = list(passes.model.parameters())
    peaks["gradients"] = [sum(p.numel() * p.element_size() for p in weights)]
    figures = Figures(pd.DataFrame(seconds), pd.DataFrame(cpu_seconds), pd.DataFrame(peaks), timed_on)
    return report_of(settings, figures, machine, sum(p.numel() for p in weights))


def build_passes(settings: Settings, device: torch.device) -> Passes:
    lengths = (settings.prompt_length, settings.response_length, settings.answer_length)
    batch = build_batch(settings.responses, *lengths, settings.scored, device, 0)
    vocab, context = SHAPES[settings.size].vocab, settings.prompt_length + settings.response_length
    model = build_model(settings.size, "qwen2", vocab, context, getattr(torch, settings.dtype), device, 0)
    request = Request.from_config(OarConfig.parse({"importance": settings.importance}), 1, settings.response_length)
    return Passes(model, batch, request, settings.micro_batch)


def works_of(passes: Passes, settings: Settings) -> dict[str, Work]:
    """By letter, in the order of a round."""
    importance_BL = torch.rand(settings.responses, settings.response_length)

    def bookkeeping(limit: int | None) -> None:
        passes.find_answers()
        passes.reshape(importance_BL)

    works: dict[str, Work] = {
        "a": passes.log_prob,
        "b": passes.fused,
        "b*": partial(passes.fused, checkpointing=True),
        "c": passes.importance_only,
        "c*": partial(passes.importance_only, checkpointing=True),
        "d": passes.published,
        "d'": partial(passes.published, weight_gradients=False),
        "e": passes.update,
        "e*": partial(passes.update, checkpointing=True),
        "f": bookkeeping,
    }
    left_out = {"both": (), "on": ("b", "c", "e"), "off": ("b*", "c*", "e*")}[settings.checkpointing]
    return {letter: work for letter, work in works.items() if letter not in left_out}


def ratios(settings: Settings) -> list[Ratio]:
    every = None if settings.scored_share == 1 else "every response scored (--scored-share 1)"
    sized = None if (settings.responses, settings.response_length) == (64, 512) else "64 responses of 512 tokens"
    small = None if settings.size == "0.1b" else "0.1B parameters (--size 0.1b)"
    b = "b*" if settings.checkpointing == "on" else "b"
    published = []
    for d, name in (("d", "published OAR-G"), ("d'", "published OAR-G, weights frozen")):
        published += [
            Ratio(
                f"{d} / {b}", f"{name}, over ours; only ours returns log-probs", 5.0, at_most=False, stated_for=sized
            ),
            Ratio(f"{d} / ({b} - a)", "over what importance adds in ours"),
            Ratio(f"(a + {d}) / {b}", "log-probs and importance, both ways"),
        ]
    same, less = "same, activation checkpointing", "same, the update's weight gradients not counted"
    return [
        Ratio("(b - a) / a", "importance adds, of a log-prob pass", 1.15, stated_for=every),
        Ratio("(b* - a) / a", same, 2.2, stated_for=every),
        Ratio("mem(b) / mem(e)", "peak memory with importance, over the update's", 1.0),
        Ratio("mem(b) / (mem(e) - gradients)", less),
        Ratio("mem(b*) / mem(e*)", "peak memory, activation checkpointing", 1.0),
        Ratio("mem(b*) / (mem(e*) - gradients)", less),
        *published,
        Ratio("c / a", "importance alone, of a log-prob pass"),
        Ratio("c* / a", same),
        Ratio("(b - a) / (a + e)", "importance adds, of log-probs and update"),
        Ratio("(b* - a) / (a + e*)", same),
        Ratio("f / a", "finder, gate and diagnostics, of a log-prob pass", 0.03, stated_for=small),
    ]


def report_of(settings: Settings, figures: Figures, machine: dict[str, Any], parameters: int) -> Report:
    measured = []
    for letter, wall in figures.seconds.items():
        mark = " (extrapolated)" if figures.timed_on.get(letter, settings.scored) < settings.scored else ""
        cells = [
            f"{wall.median():.4g}",
            f"{wall.min():.4g} .. {wall.max():.4g}",
            f"{figures.cpu_seconds[letter].median():.4g}",
            f"{(wall / figures.seconds['a']).median():.3g}",
            f"{figures.peaks[letter][0] / 2**20:.0f}" if letter in figures.peaks else "",
        ]
        measured.append((f"{letter}: {TITLES[letter]}{mark}", *cells))
    columns = ("candidate", "seconds", "fastest .. slowest", "CPU seconds", "of a", "peak MiB")
    cpu_seconds = figures.cpu_seconds if machine["device"] == "cpu" else None
    judged = ratio_table("Ratios", ratios(settings), figures.seconds, cpu_seconds, figures.peaks)
    batch = f"{settings.responses} x {settings.response_length}"
    return Report(
        title=f"What importance costs in a step: {settings.size}, {batch}, {settings.dtype}, {machine['device']}",
        stem=f"step_{machine['device']}_{settings.size}",
        command="",
        machine=machine,
        tables=[Table("Candidates", columns, measured), judged],
        notes=notes(settings, figures, machine, parameters),
        runs={
            "settings": asdict(replace(settings, out=None)),
            "parameters": parameters,
            "seconds": figures.seconds.to_dict("list"),
            "cpu_seconds": figures.cpu_seconds.to_dict("list"),
            "peak_bytes": figures.peaks.iloc[0].to_dict(),
            "timed_on": figures.timed_on,
        },
    )


def notes(settings: Settings, figures: Figures, machine: dict[str, Any], parameters: int) -> list[str]:
    """How the figures came about; what a reader must know before quoting one."""
    on_cpu = "counted storage by storage, without scratch memory inside a kernel"
    lines = [
        f"qwen2 with random weights, {parameters / 1e6:.1f}M parameters (tied embeddings once), vocabulary "
        f"{SHAPES[settings.size].vocab}, {settings.dtype}; {settings.responses} responses of {settings.response_length} "
        f"tokens after prompts of {settings.prompt_length}, answers of {settings.answer_length}, {settings.micro_batch} "
        "sequences a micro-batch; one process. All sequences have one length and attention is sdpa with a causal mask: packing "
        "would change nothing.",
        f"{settings.rounds} rounds, each candidate once a round, after a warm-up on one micro-batch. Ratios are medians of "
        "the ratios of single rounds, with the interval of the sign test, which needs six rounds. On a CPU the same ratio of "
        "processor seconds stands beside: it moves less when the machine is shared.",
        f"Ours computes {settings.importance} in b and c; d computes OAR-G.",
        f"Log-probs and entropy are taken in chunks of {CHUNK} rows, in float32 (verl: entropy_from_logits_with_chunking). "
        "The update's log-prob writes its gradient over the logits (the leanest known); the update clips gradients and takes "
        "one AdamW step.",
        "Memory is the peak on top of weights and optimizer state, over two micro-batches (two responses in d), "
        f"{on_cpu if machine['device'] == 'cpu' else 'by the allocator of CUDA'}.",
        "d runs the published procedure on the scored responses, one at a time, without activation checkpointing, and lets "
        "backward compute weight gradients as the published code does; d' follows the paper's text and does not. Neither "
        "returns log-probs.",
    ]
    if settings.scored_share < 1:
        lines.append(
            f"Importance for {settings.scored} of {settings.responses} responses (--scored-share); b runs the others "
            "without a graph, c and d leave them out (the published code would score them too)."
        )
    for letter, count in figures.timed_on.items():
        if count < settings.scored:
            scale = f"{settings.scored} / {count}"
            lines.append(f"EXTRAPOLATED: {letter} was timed on {count} responses, its seconds multiplied by {scale}.")
    return lines
