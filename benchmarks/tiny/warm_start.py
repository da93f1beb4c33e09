"""Models that half know a task: imitation of demonstrations with errors, kept on disk.

Copying is slow to learn behind filler, so demonstrations without any come first, and filler weighs little in the loss.
"""

import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.machine import cache_folder
from benchmarks.tiny.model import sample
from benchmarks.tiny.tasks import Task
from benchmarks.tiny.words import FILLER, PAD, VALUES

FILLER_WEIGHT, VALUE_WEIGHT = 0.1, 2.0
"""In the loss. Values, digits and names, are what is copied and worked out; other symbols weigh 1."""
LEARNED = 0.5
"""Share of right answers, each of the most likely tokens, at which a model is taken to know its task. A perfect imitator has
all of them right, however many errors it saw."""
RAMP = 30
"""Steps over which the learning rate rises."""
Progress = Callable[[str, int, int], object]
"""Called after each step of a training: what it is and its loss, steps done, of how many."""


@dataclass(frozen=True)
class WarmStart:
    """A model's size, and how it is prepared: `short_steps` on demonstrations without filler, then `full_steps` with it."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    short_steps: int = 800
    full_steps: int = 400
    batch: int = 64
    learning_rate: float = 3e-3


def kept_weights(folder: str, name: str, key: object, make: Callable[[], PreTrainedModel]) -> dict[str, Tensor]:
    """The state of a model, made now or kept in `FOLDER` of `$XDG_CACHE_HOME/oar_plugin` or `~/.cache/oar_plugin`.

    `key`: all that it depends on, as JSON can hold it.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    cache = cache_folder() / folder
    file = cache / f"{name}-{digest}.pt"
    if file.exists():
        return dict(torch.load(file, weights_only=True))
    weights: dict[str, Tensor] = make().state_dict()
    cache.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")  # whole or not at all, whoever else writes it
    torch.save(weights, part)
    part.replace(file)
    return weights


def train(
    model: PreTrainedModel, task: Task, seed: int, settings: WarmStart, progress: Progress = lambda *_: None
) -> None:
    """Imitate demonstrations. The same seed on the same machine gives the same weights."""
    parts: Any = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    short = batches(task, settings.batch, 2 * seed, (0, 0))
    full = batches(task, settings.batch, 2 * seed + 1, None)
    weight_V = word_weights(model)
    stream = itertools.chain(itertools.islice(short, settings.short_steps), itertools.islice(full, settings.full_steps))
    for step, (token_BL, label_BL) in enumerate(stream):
        # Falls along half a cosine over the second part only.
        part = max(0.0, (step - settings.short_steps) / max(1, settings.full_steps))
        rate = settings.learning_rate * min(1.0, (step + 1) / RAMP) * 0.5 * (1 + math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = rate
        hidden_BLH = parts.model(input_ids=token_BL, use_cache=False).last_hidden_state
        labelled = label_BL[:, 1:] != PAD
        loss = F.cross_entropy(parts.lm_head(hidden_BLH[:, :-1][labelled]), label_BL[:, 1:][labelled], weight_V)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        what = f"training {task.name}, seed {seed}, loss {loss.item():.2f}"
        progress(what, step + 1, settings.short_steps + settings.full_steps)


def word_weights(model: PreTrainedModel) -> Tensor:
    """Of each word of its vocabulary in the loss, `[V]`."""
    weights = {**dict.fromkeys(FILLER, FILLER_WEIGHT), **dict.fromkeys(VALUES, VALUE_WEIGHT)}
    return torch.tensor([weights.get(word, 1.0) for word in range(model.config.vocab_size)])


def batches(task: Task, size: int, seed: int, filler: tuple[int, int] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless token ids and labels `[size, longest]` of prompts with a demonstration; `PAD` where there is no label."""
    rng = random.Random(seed)
    while True:
        rows = [[*prompt, *response] for prompt, response in (task.example(rng, filler) for _ in range(size))]
        longest = max(map(len, rows))
        token_BL = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        label_BL = token_BL.clone()
        label_BL[:, : task.prompt_length] = PAD
        yield token_BL, label_BL


def accuracy(model: PreTrainedModel, task: Task, problems: int, greedy: bool, seed: int = 10**6) -> float:
    """Share of right responses to held-out problems, one each: sampled, or of the most likely tokens."""
    asked = list(itertools.islice(task.problems(seed), problems))
    generator = None if greedy else torch.Generator().manual_seed(seed)
    prompt_BP = torch.tensor([problem.prompt for problem in asked])
    response_BR = sample(model, prompt_BP, 1, task.max_response_length, generator)
    right = [task.read(problem, row).right for problem, row in zip(asked, response_BR.tolist(), strict=True)]
    return sum(right) / problems
