"""Every candidate of a training step, measured side by side in one process.

Round by round each candidate takes the whole batch once, so that a machine that slows down slows all of them. Memory is
measured last, on two micro-batches a candidate: by the second, the update holds its gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.count.meter import Meter
from benchmarks.machine import Device, choose_device, peak_bytes, timed
from benchmarks.report import Progress, Report, Table, silent
from benchmarks.statistics import Ratio, ratio_table
from benchmarks.step.passes import CHUNK, Passes
from benchmarks.workload import ScoredWorkload, model_line
from oar_plugin.config import OarConfig
from oar_plugin.passes.request import Request

CANDIDATES: dict[str, tuple[str, Callable[..., object]]] = {
    "a": ("log-prob forward", Passes.log_prob),
    "b": ("log-probs + importance, fused", Passes.fused),
    "b*": ("same, activation checkpointing", partial(Passes.fused, checkpointing=True)),
    "c": ("importance alone", Passes.importance_only),
    "c*": ("same, activation checkpointing", partial(Passes.importance_only, checkpointing=True)),
    "d": ("published OAR-G, as its code", Passes.published),
    "d'": ("published OAR-G, weights frozen", partial(Passes.published, weight_gradients=False)),
    "e": ("actor update", Passes.update),
    "e*": ("same, activation checkpointing", partial(Passes.update, checkpointing=True)),
    "f": ("answer finder, gate, diagnostics", Passes.bookkeeping),
}
"""By letter, in the order of a round: a title, and what takes the passes and a limit."""

PUBLISHED_SECONDS = 60.0
"""Longest that the published procedure may take in one round before a part of the responses is timed and scaled up."""


@dataclass(frozen=True)
class Settings(ScoredWorkload):
    device: Device = "auto"
    """auto takes CUDA where there is one."""
    out: Path | None = None
    """Write step_DEVICE_SIZE.md and .json into this folder (default: only the terminal)."""


def measure(settings: Settings, progress: Progress = silent) -> Report:
    """Build the model and run every candidate."""
    progress("building the model")
    device = choose_device(settings.device)
    passes = build_passes(settings, device)
    seconds, cpu_seconds = ({letter: list[float]() for letter in CANDIDATES} for _ in range(2))
    timed_on, peaks, flops = dict.fromkeys(("d", "d'"), settings.scored), dict[str, int](), dict[str, float]()
    pieces = [(number, letter) for number in range(settings.rounds + 2) for letter in CANDIDATES]
    for done, (number, letter) in enumerate(pieces):
        title, candidate = CANDIDATES[letter]
        work = partial(candidate, passes)
        name = {0: "warm-up", settings.rounds + 1: "memory"}.get(number, f"round {number} of {settings.rounds}")
        progress(f"{name}: {title}", done, len(pieces))
        if name == "warm-up":
            with Meter() as meter:
                meter.begin(letter)
                work(1)
            # The published procedure takes one response at a time, the others a micro-batch.
            taken = 1 if letter in timed_on else min(settings.micro_batch, settings.scored)
            flops[letter] = meter.numbers["flops"][letter] / taken
            if letter in timed_on:
                one, _ = timed(partial(work, 1), device)
                timed_on[letter] = min(max(2, int(PUBLISHED_SECONDS / one)), settings.scored)
        elif name == "memory":
            if letter != "f":
                peaks[letter] = peak_bytes(partial(work, 2), device)
        else:
            wall, cpu = timed(partial(work, timed_on.get(letter)), device)
            scale = settings.scored / timed_on.get(letter, settings.scored)
            seconds[letter].append(wall * scale)
            cpu_seconds[letter].append(cpu * scale)
    weights = list(passes.model.parameters())
    runs = {
        "settings": asdict(replace(settings, out=None)),
        "parameters": sum(p.numel() for p in weights),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": {**peaks, "gradients": sum(p.numel() * p.element_size() for p in weights)},
        "timed_on": timed_on,
        "flops": flops,
    }
    return report_of(settings, runs, device.type)


def build_passes(settings: ScoredWorkload, device: torch.device) -> Passes:
    batch = settings.batch(settings.response_length, settings.scored, device)
    model = settings.model(settings.prompt_length + settings.response_length, device)
    request = Request.from_config(OarConfig.parse({"importance": settings.importance}), 1, settings.response_length)
    return Passes(model, batch, request, settings.micro_batch)


def ratios(settings: Settings) -> list[Ratio]:
    every = None if settings.scored_share == 1 else "every response scored (--scored-share 1)"
    sized = None if (settings.responses, settings.response_length) == (64, 512) else "64 responses of 512 tokens"
    small = None if settings.size == "0.1b" else "0.1B parameters (--size 0.1b)"
    same, less = "same, activation checkpointing", "same, the update's weight gradients not counted"
    over_ours = "over ours; only ours returns log-probs"
    over_added, both_ways = "over what importance adds in ours", "log-probs and importance, both ways"
    return [
        Ratio("(b - a) / a", "importance adds, of a log-prob pass", 1.15, stated_for=every),
        Ratio("(b* - a) / a", same, 2.2, stated_for=every),
        Ratio("mem(b) / mem(e)", "peak memory with importance, over the update's", 1.0),
        Ratio("mem(b) / (mem(e) - gradients)", less),
        Ratio("mem(b*) / mem(e*)", "peak memory, activation checkpointing", 1.0),
        Ratio("mem(b*) / (mem(e*) - gradients)", less),
        Ratio("d / b", f"published OAR-G, {over_ours}", 5.0, at_most=False, stated_for=sized),
        Ratio("d / (b - a)", over_added),
        Ratio("(a + d) / b", both_ways),
        Ratio("d' / b", f"published OAR-G, weights frozen, {over_ours}", 5.0, at_most=False, stated_for=sized),
        Ratio("d' / (b - a)", over_added),
        Ratio("(a + d') / b", both_ways),
        Ratio("c / a", "importance alone, of a log-prob pass"),
        Ratio("c* / a", same),
        Ratio("(b - a) / (a + e)", "importance adds, of log-probs and update"),
        Ratio("(b* - a) / (a + e*)", same),
        Ratio("f / a", "finder, gate and diagnostics, of a log-prob pass", 0.03, stated_for=small),
    ]


def report_of(settings: Settings, runs: Mapping[str, Any], device: str) -> Report:
    """The page of what `measure` found: a row a round, and peaks on top of what is always there."""
    seconds, cpu_seconds, peaks = pd.DataFrame(runs["seconds"]), pd.DataFrame(runs["cpu_seconds"]), runs["peak_bytes"]
    flops = runs["flops"]
    scaled = {letter: count for letter, count in runs["timed_on"].items() if count < settings.scored}
    rows = [
        [
            f"{letter}: {CANDIDATES[letter][0]}{' (extrapolated)' if letter in scaled else ''}",
            f"{wall.median():.4g}",
            f"{wall.min():.4g} .. {wall.max():.4g}",
            f"{cpu_seconds[letter].median():.4g}",
            f"{(wall / seconds['a']).median():.3g}",
            f"{flops[letter] / flops['a']:.3g}" if flops[letter] else "",
            f"{peaks[letter] / 2**20:.0f}" if letter in peaks else "",
        ]
        for letter, wall in seconds.items()
    ]
    columns = ("candidate", "seconds", "fastest .. slowest", "CPU seconds", "of a", "FLOPs of a", "peak MiB")
    told = cpu_seconds if device == "cpu" else None
    judged = ratio_table("Ratios", ratios(settings), seconds, told, pd.DataFrame([peaks]))
    batch = f"{settings.responses} x {settings.response_length}"
    on_cpu = "counted storage by storage, without scratch memory inside a kernel"
    notes = [
        f"{model_line(settings.size, runs['parameters'], settings.dtype)}; {settings.responses} responses of "
        f"{settings.response_length} tokens after prompts of {settings.prompt_length}, answers of {settings.answer_length}, "
        f"{settings.micro_batch} sequences a micro-batch; one process, sdpa attention. Log-probs and entropy are taken in "
        f"chunks of {CHUNK} rows.",
        f"{settings.rounds} rounds, each candidate once a round. Ratios are medians of the ratios of single rounds, with the "
        "interval of the sign test, which needs six. On a CPU the same ratio of processor seconds stands beside: it moves "
        "less when the machine is shared.",
        "FLOPs of a are those of one response that is scored, counted while it ran: matrix products and attention, half of it "
        "where it is causal. What takes more seconds than FLOPs waits for memory or for many small operations.",
        "Memory is the peak on top of weights and optimizer state, over two micro-batches (two responses in d), "
        f"{on_cpu if device == 'cpu' else 'by the allocator of CUDA'}.",
        f"Importance for {settings.scored} of {settings.responses} responses (--scored-share): {settings.importance} in b and "
        "c, OAR-G in d, without activation checkpointing. b runs the others without a graph, c and d leave them out.",
        "How it is kept fair: docs/evidence/studies.md.",
        *(
            f"EXTRAPOLATED: {letter} was timed on {count} responses, its seconds multiplied by {settings.scored} / {count}."
            for letter, count in scaled.items()
        ),
    ]
    title = f"What importance costs in a step: {settings.size}, {batch}, {settings.dtype}, {device}"
    stem = f"step_{device}_{settings.size}"
    return Report(title, stem, [Table("Candidates", columns, rows), judged], notes, dict(runs))
