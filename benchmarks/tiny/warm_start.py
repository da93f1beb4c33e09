"""Models that half know a task: imitation of demonstrations with errors, kept on disk.

Copying is slow to learn behind filler, so demonstrations without any come first, and filler weighs little in the loss.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.tiny.model import build_model, sample
from benchmarks.tiny.tasks import Task
from benchmarks.tiny.words import FILLER, PAD, VALUES, VOCABULARY

FORMAT = 1
"""Raised when training changes, so that models of an older version are not taken from disk."""
FILLER_WEIGHT = 0.1
VALUE_WEIGHT = 2.0
"""Of digits and names in the loss: what is copied and worked out. Other symbols weigh 1."""
LEARNED = 0.5
"""Share of right answers, each of the most likely tokens, at which a model is taken to know its task. A perfect imitator has
all of them right, however many errors it saw."""
TRIED_ON = 128
TRIES = 3
"""Models a wanted one, at most."""
RAMP = 30
"""Steps over which the learning rate rises."""

Progress = Callable[[int, int, float], None]
"""Called after each step with the number of steps done, of all steps, and the loss."""


@dataclass(frozen=True)
class WarmStart:
    """How a model is prepared.

    Attributes:
        hidden: width of the model.
        layers: of the model.
        heads: of attention.
        short_steps: on demonstrations without filler.
        full_steps: on demonstrations as they will be sampled.
        batch: demonstrations a step.
        learning_rate: highest.
    """

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    short_steps: int = 800
    full_steps: int = 400
    batch: int = 64
    learning_rate: float = 3e-3


def cache_folder() -> Path:
    """Where models are kept: `$XDG_CACHE_HOME/oar_plugin`, by default `~/.cache/oar_plugin`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "oar_plugin"


def warm_model(
    task: Task,
    seed: int,
    settings: WarmStart | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> LlamaForCausalLM:
    """The model of a task and seed, from disk or trained now.

    Args:
        task: that it is to half know.
        seed: of weights and demonstrations.
        settings: how it is trained; None for the defaults.
        cache: folder of kept models; None for `cache_folder()`.
        progress: called after each step of a training.
    """
    settings = settings or WarmStart()
    described = {
        "task": asdict(task),
        "seed": seed,
        "settings": asdict(settings),
        "words": VOCABULARY,
        "format": FORMAT,
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    file = (cache or cache_folder()) / "reasoning" / f"{task.name}-{seed}-{digest}.pt"
    if file.exists():
        model = build_model(seed, settings.hidden, settings.layers, settings.heads)
        model.load_state_dict(torch.load(file, weights_only=True))
        return model
    model = train(task, seed, settings, progress)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")  # whole or not at all, whoever else writes it
    torch.save(model.state_dict(), part)
    part.replace(file)
    return model


def learned_model(
    task: Task, number: int, cache: Path | None = None, settings: WarmStart | None = None
) -> LlamaForCausalLM:
    """One of the models, from 0 by ascending seed, that learned their task: some get stuck before they can copy.

    Raises:
        ValueError: too few of them do.
    """
    return warm_model(task, _learned_seed(task, number, cache, settings), settings, cache)


@functools.cache
def _learned_seed(task: Task, number: int, cache: Path | None, settings: WarmStart | None) -> int:
    """Examined once: a study asks for the same model before every training."""
    seeds = TRIES * (number + 1)
    learned = 0
    for seed in range(seeds):
        model = warm_model(task, seed, settings, cache)
        if accuracy(model, task, TRIED_ON, greedy=True) < LEARNED:
            continue
        if learned == number:
            return seed
        learned += 1
    raise ValueError(
        f"task {task.name}: of {seeds} warm models {learned} learned it (right in {LEARNED:.0%} of their most likely answers), "
        f"{number + 1} were asked for; take fewer --warm-starts or another task"
    )


def train(task: Task, seed: int, settings: WarmStart, progress: Progress | None = None) -> LlamaForCausalLM:
    """Build a model and train it; see `warm_model`."""
    model = build_model(seed, settings.hidden, settings.layers, settings.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    short = batches(task, settings.batch, 2 * seed, (0, 0))
    full = batches(task, settings.batch, 2 * seed + 1, None)
    total = settings.short_steps + settings.full_steps
    weight_V = torch.ones(len(VOCABULARY))
    weight_V[list(FILLER)], weight_V[list(VALUES)] = FILLER_WEIGHT, VALUE_WEIGHT
    stream = itertools.chain(itertools.islice(short, settings.short_steps), itertools.islice(full, settings.full_steps))
    for step, (token_BL, label_BL) in enumerate(stream):
        # Falls along half a cosine over the second part only.
        part = max(0.0, (step - settings.short_steps) / max(1, settings.full_steps))
        rate = settings.learning_rate * min(1.0, (step + 1) / RAMP) * 0.5 * (1 + math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = rate
        outputs: Any = model.model(input_ids=token_BL, use_cache=False)
        labelled = label_BL[:, 1:] != PAD
        label_N = label_BL[:, 1:][labelled]
        loss = F.cross_entropy(model.lm_head(outputs.last_hidden_state[:, :-1][labelled]), label_N, weight_V)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(step + 1, total, loss.item())
    return model.requires_grad_(True).eval()


def batches(task: Task, size: int, seed: int, filler: tuple[int, int] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless token ids and labels `[size, longest]` of prompts with a demonstration; `PAD` where there is no label."""
    rng = random.Random(seed)
    while True:
        pairs = []
        for _ in range(size):
            problem = task.problem(rng)
            pairs.append((problem.prompt, task.demonstration(problem, rng, task.error_rate, filler)))
        longest = max(len(prompt) + len(response) for prompt, response in pairs)
        token_BL = torch.full((size, longest), PAD)
        for row, (prompt, response) in enumerate(pairs):
            token_BL[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
        label_BL = token_BL.clone()
        label_BL[:, : task.prompt_length] = PAD
        yield token_BL, label_BL


def accuracy(model: LlamaForCausalLM, task: Task, problems: int, greedy: bool, seed: int = 10**6) -> float:
    """Share of right responses to held-out problems, one each: sampled, or of the most likely tokens."""
    asked = list(itertools.islice(task.problems(seed), problems))
    generator = None if greedy else torch.Generator().manual_seed(seed)
    prompt_BP = torch.tensor([problem.prompt for problem in asked])
    response_BR = sample(model, prompt_BP, 1, task.max_response_length, generator)
    right = [task.read(problem, row).right for problem, row in zip(asked, response_BR.tolist(), strict=True)]
    return sum(right) / problems
