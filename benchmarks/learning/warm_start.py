"""Models that half know a task: imitation of demonstrations with errors, after lessons that go on until they are learned.

A model that cannot copy yet learns nothing from long demonstrations with errors, and how long it takes until it can is chance:
so there is no number of steps for that, but a share of right answers.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.learning.tasks import TASKS, lessons
from benchmarks.tiny.fast import head_of, rows_of
from benchmarks.tiny.model import build_model
from benchmarks.tiny.tasks import Task
from benchmarks.tiny.warm_start import FILLER_WEIGHT, VALUE_WEIGHT, accuracy, batches, kept_weights, word_weights
from benchmarks.tiny.words import PAD, VOCABULARY

FORMAT = 1
"""Raised when training changes, so that models of an older version are not taken from disk."""
HIDDEN, LAYERS, HEAD = 64, 2, 32
"""`HEAD` is the smallest that vLLM serves on a CPU."""
BATCH, LEARNING_RATE, RAMP = 64, 3e-3, 30
LEARNED, EVERY, LONGEST = 0.95, 50, 1000
"""A lesson is over at this share of right answers, each of the most likely tokens, asked for every so many steps; and a model
that takes longer than this for one is stuck, and begins again with other weights."""
ATTEMPTS = 20
"""Most models come out of the first; one of twenty-four was stuck five times."""
IMITATION = 250
"""Steps on whole demonstrations with errors."""
ENOUGH = 0.8
"""Share of right answers, each of the most likely tokens, of a model that knows its task. A perfect imitator has all of them
right, however many errors it saw."""
ASKED = 128
Progress = Callable[..., object]


class StuckError(RuntimeError):
    """A model did not learn its task."""


@functools.cache
def warm_weights(name: str, number: int, progress: Progress = lambda *_: None) -> dict[str, Tensor]:
    """The state of model `number` of a task, trained now or kept in `$XDG_CACHE_HOME/oar_plugin` or `~/.cache/oar_plugin`.

    Raises:
        StuckError: it did not learn the task.
    """
    task = TASKS[name]
    teaching = [BATCH, LEARNING_RATE, LEARNED, EVERY, LONGEST, ENOUGH]
    recipe = [FORMAT, RAMP, IMITATION, ASKED, *teaching, HIDDEN, LAYERS, HEAD]
    words = [FILLER_WEIGHT, VALUE_WEIGHT, VOCABULARY, type(task).__name__, task.FILLER]
    key = [asdict(task), number, recipe, words]
    return kept_weights("learning", f"{name}-{number}", key, lambda: _taught(task, number, progress))


def _new(seed: int) -> PreTrainedModel:
    return build_model(seed, HIDDEN, LAYERS, heads=HIDDEN // HEAD)


def _taught(task: Task, number: int, progress: Progress) -> PreTrainedModel:
    for attempt in range(ATTEMPTS):
        model = _new(number + 1000 * attempt)
        if teach(model, task, number, progress):
            break
    else:
        raise StuckError(f"task {task.name}, warm model {number}: stuck in {ATTEMPTS} attempts")
    share = accuracy(model, task, ASKED, greedy=True)
    if share < ENOUGH:
        raise StuckError(f"task {task.name}, warm model {number}: right in {share:.0%} of its most likely answers")
    return model


def warm_model(name: str, number: int, progress: Progress = lambda *_: None) -> PreTrainedModel:
    """A new copy of it; see `warm_weights`."""
    weights = warm_weights(name, number, progress)
    model = _new(number)
    model.load_state_dict(weights)
    return model


def teach(model: PreTrainedModel, task: Task, seed: int, progress: Progress = lambda *_: None) -> list[int]:
    """Train it in place. The same seed on the same machine gives the same weights.

    Returns:
        The steps that each lesson took; none where one was not learned in `LONGEST`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    taken, rng = [], random.Random(seed)
    for lesson, filler in enumerate([(0, 0), task.filler]):
        whole = type(task)(task.name, task.steps, filler, 0.0)
        taught = lessons(task, rng, filler) if lesson == 0 else itertools.repeat(whole)
        stream = (next(batches(part, BATCH, rng.getrandbits(32), None)) for part in taught)
        for step, batch in enumerate(itertools.islice(stream, LONGEST), 1):
            _imitate(model, optimizer, *batch, LEARNING_RATE * min(1.0, (step if lesson == 0 else RAMP) / RAMP))
            if step % EVERY == 0:
                share = accuracy(model, whole, ASKED, greedy=True)
                progress(
                    f"teaching {task.name} to model {seed}, lesson {lesson + 1}: {share:.0%} right after {step} steps"
                )
                if share >= LEARNED:
                    break
        else:
            return []
        taken.append(step)
    demonstrations: Iterator[tuple[Tensor, Tensor]] = batches(task, BATCH, rng.getrandbits(32), None)
    for step, batch in enumerate(itertools.islice(demonstrations, IMITATION)):
        _imitate(model, optimizer, *batch, LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / IMITATION)))
        progress(f"training model {seed} on {task.name}", step, IMITATION)
    optimizer.zero_grad()
    return taken


def _imitate(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, token_BL: Tensor, label_BL: Tensor, rate: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    hidden_BLH = rows_of(model, model.get_input_embeddings()(token_BL))
    labelled = label_BL[:, 1:] != PAD
    logits_NV = F.linear(hidden_BLH[:, :-1][labelled], head_of(model))
    loss = F.cross_entropy(logits_NV, label_BL[:, 1:][labelled], word_weights(model))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
