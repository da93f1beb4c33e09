"""A model small enough to train in seconds, with prompts to match, for smoke tests of recipes and whole runs in tests.

Some of its responses are right and some wrong, every one has an answer, and one token of each decides it.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from benchmarks.tiny.data import write_problems
from benchmarks.tiny.model import build_model
from benchmarks.tiny.random_models import Architecture
from benchmarks.tiny.tasks import Chain
from benchmarks.tiny.warm_start import WarmStart, train
from benchmarks.tiny.words import make_tokenizer

VOCABULARY = 384
"""Words and bytes: recipes may ask with a text of their own. Even, because layouts cut the vocabulary in parts."""


def make_assets(folder: Path, filler: tuple[int, int] = (2, 5), architecture: Architecture = "qwen2") -> None:
    """Write `model/` and `data.parquet`. About ten seconds.

    `filler`: how many words a response begins with, fewest and most.
    """
    task = Chain("smoke", steps=1, filler=filler, error_rate=0.3)
    model = build_model(0, hidden=64, layers=2, heads=2, architecture=architecture, vocab=VOCABULARY, tied=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads only get in each other's way at this size
    train(model, task, 0, WarmStart(short_steps=400, full_steps=100))
    torch.set_num_threads(threads)
    model.save_pretrained(folder / "model")
    make_tokenizer(VOCABULARY).save_pretrained(folder / "model")
    write_problems(folder / "data.parquet", list(itertools.islice(task.problems(0), 64)))
