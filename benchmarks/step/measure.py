"""Every candidate of `oar bench step`, measured side by side in one process.

Round by round each candidate takes the whole batch once, so that a machine that slows down slows all of them; the first
round is warm-up, on one micro-batch, and thrown away. Memory is measured last, on two micro-batches a candidate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.importance import DEFAULT, check_importance
from benchmarks.machine import Device, check_device, choose_device, describe_machine, load_average, threads, timed
from benchmarks.memory import peak_bytes
from benchmarks.step.passes import Passes
from benchmarks.tiny.random_models import SHAPES, Architecture, build_batch, build_model
from oar_plugin.config import OarConfig
from oar_plugin.passes.request import Request

LOG_PROB, BOOKKEEPING = "log_prob", "bookkeeping"
FUSED, FUSED_CKPT = "fused", "fused_checkpointing"
ONLY, ONLY_CKPT = "importance_only", "importance_only_checkpointing"
PUBLISHED, PUBLISHED_FROZEN = "published", "published_frozen_weights"
UPDATE, UPDATE_CKPT = "update", "update_checkpointing"

# Longest that the published procedure may take in one round before a part of the responses is measured and scaled up.
PUBLISHED_SECONDS = 60.0


@dataclass(frozen=True)
class Settings:
    """The arguments of one run; `vocab` and `published_responses` are None for "choose"."""

    size: str = "0.1b"
    architecture: Architecture = "qwen2"
    vocab: int | None = None
    responses: int = 64
    response_length: int = 512
    prompt_length: int = 128
    answer_length: int = 8
    micro_batch: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Device = "auto"
    rounds: int = 5
    checkpointing: Literal["on", "off", "both"] = "both"
    importance: str = DEFAULT
    scored_share: float = 1.0
    published_responses: int | None = None
    threads: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises: ValueError, with the argument, its value and what is allowed."""
        for name in ("responses", "response_length", "prompt_length", "answer_length", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.rounds < 2:
            raise ValueError(f"--rounds {self.rounds}: must be at least 2, because the first is thrown away")
        if not 0 < self.scored_share <= 1:
            raise ValueError(f"--scored-share {self.scored_share}: must be in (0, 1]")
        if self.published_responses is not None and self.published_responses < 1:
            raise ValueError(f"--published-responses {self.published_responses}: must be at least 1")
        check_importance(self.importance)
        check_device(self.device)

    @property
    def scored(self) -> int:
        """How many responses get importance."""
        return max(1, round(self.responses * self.scored_share))


@dataclass
class Candidate:
    """One thing that is measured.

    Attributes:
        key: its name in the JSON.
        letter: its name in ratios.
        title: its name in tables.
        work: does it; the argument limits the number of micro-batches (responses for the published procedure).
        limit: passed to `work` when timing.
        scale: what the seconds are multiplied with; above 1 they are an extrapolation.
        seconds: wall seconds of each counted round.
        cpu_seconds: processor seconds of this process in the same rounds.
        peak_bytes: memory on top of what is always there; None where it is not measured.
    """

    key: str
    letter: str
    title: str
    work: Callable[[int | None], object]
    limit: int | None = None
    scale: float = 1.0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        """Median of the wall seconds."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "key": self.key,
            "letter": self.letter,
            "title": self.title,
            "median_seconds": self.median,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "extrapolated_by": self.scale,
            "peak_bytes": self.peak_bytes,
        }


@dataclass
class Result:
    """A finished run."""

    settings: Settings
    candidates: dict[str, Candidate]
    machine: dict[str, Any]
    parameters: int
    weight_bytes: int
    vocab: int

    def seconds(self, key: str) -> float:
        """Median wall seconds of a candidate."""
        return self.candidates[key].median


Progress = Callable[[str], None]


def steps(settings: Settings) -> int:
    """How often `measure` will report progress."""
    count = len(_keys(settings))
    return 1 + count * settings.rounds + count


def measure(settings: Settings, progress: Progress = lambda what: None) -> Result:
    """Build the model and run every candidate.

    Args:
        settings: the run.
        progress: called with a description as each piece of work begins, `steps(settings)` times.

    Raises:
        ValueError: settings that cannot work.
    """
    settings.check()
    progress("building the model")
    device = choose_device(settings.device)
    with threads(settings.threads):
        machine = describe_machine(device)
        passes, candidates = build_candidates(settings, device)
        for candidate in candidates.values():
            progress(f"warm-up: {candidate.title}")
            _warm_up(candidate, device, settings)
        for number in range(1, settings.rounds):
            for candidate in candidates.values():
                progress(f"round {number} of {settings.rounds - 1}: {candidate.title}")
                _run_once(candidate, device)
        for candidate in candidates.values():
            progress(f"memory: {candidate.title}")
            if candidate.key != BOOKKEEPING:
                candidate.peak_bytes = _peak(candidate, device)
        machine["load_average_after"] = load_average()
    parameters = list(passes.model.parameters())
    return Result(
        settings,
        candidates,
        machine,
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        vocab=settings.vocab or SHAPES[settings.size].vocab,
    )


def build_candidates(settings: Settings, device: torch.device) -> tuple[Passes, dict[str, Candidate]]:
    """The passes and what is measured of them, in the order of a round."""
    length = settings.prompt_length + settings.response_length
    vocab = settings.vocab or SHAPES[settings.size].vocab
    model = build_model(
        settings.size, settings.architecture, vocab, length, getattr(torch, settings.dtype), device, settings.seed
    )
    batch = build_batch(
        settings.responses,
        settings.prompt_length,
        settings.response_length,
        settings.answer_length,
        settings.scored,
        device,
        settings.seed,
    )
    if int(batch.token_BL.max()) >= vocab:
        raise ValueError(f"--vocab {vocab}: must be more than {int(batch.token_BL.max())}, the tokenizer's largest id")
    config = OarConfig.parse({"importance": settings.importance, "seed": settings.seed})
    passes = Passes(model, batch, Request.from_config(config, 1, settings.response_length), settings.micro_batch)
    importance_BL = torch.rand(settings.responses, settings.response_length)

    def bookkeeping(limit: int | None) -> None:
        passes.find_answers()
        passes.reshape(importance_BL)

    works: dict[str, tuple[str, str, Callable[[int | None], object]]] = {
        LOG_PROB: ("a", "log-prob forward", passes.log_prob),
        FUSED: ("b", "log-probs + importance, fused", passes.fused),
        FUSED_CKPT: ("b*", "same, activation checkpointing", lambda n: passes.fused(n, checkpointing=True)),
        ONLY: ("c", "importance alone", passes.importance_only),
        ONLY_CKPT: ("c*", "same, activation checkpointing", lambda n: passes.importance_only(n, checkpointing=True)),
        PUBLISHED: ("d", "published OAR-G, as its code", passes.published),
        PUBLISHED_FROZEN: ("d'", "published OAR-G, weights frozen", lambda n: passes.published(n, False)),
        UPDATE: ("e", "actor update", passes.update),
        UPDATE_CKPT: ("e*", "same, activation checkpointing", lambda n: passes.update(n, checkpointing=True)),
        BOOKKEEPING: ("f", "answer finder, gate, diagnostics", bookkeeping),
    }
    candidates = {key: Candidate(key, *works[key]) for key in _keys(settings)}
    return passes, candidates


def _keys(settings: Settings) -> list[str]:
    keys = [LOG_PROB, FUSED, FUSED_CKPT, ONLY, ONLY_CKPT, PUBLISHED, PUBLISHED_FROZEN, UPDATE, UPDATE_CKPT, BOOKKEEPING]
    left_out = {"both": (), "on": (FUSED, ONLY, UPDATE), "off": (FUSED_CKPT, ONLY_CKPT, UPDATE_CKPT)}
    return [key for key in keys if key not in left_out[settings.checkpointing]]


def _warm_up(candidate: Candidate, device: torch.device, settings: Settings) -> None:
    """One micro-batch; for the published procedure two responses, the second of which tells how many to measure."""
    candidate.work(1)
    if candidate.key in (PUBLISHED, PUBLISHED_FROZEN):
        one, _ = timed(lambda: candidate.work(1), device)
        count = settings.published_responses or max(2, int(PUBLISHED_SECONDS / one))
        candidate.limit = min(count, settings.scored)
        candidate.scale = settings.scored / candidate.limit


def _run_once(candidate: Candidate, device: torch.device) -> None:
    wall, cpu = timed(lambda: candidate.work(candidate.limit), device)
    candidate.seconds.append(wall * candidate.scale)
    candidate.cpu_seconds.append(cpu * candidate.scale)


def _peak(candidate: Candidate, device: torch.device) -> int:
    """Of two micro-batches: by the second, the update holds its gradients."""

    def work() -> None:
        candidate.work(2)

    return peak_bytes(work, device)
