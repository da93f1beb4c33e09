"""What several studies check of their options, and what a page says of a model with random weights."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from benchmarks.tiny.model import SHAPES
from oar_plugin.credit.importance import importance_of, named

DEFAULT = "fisher"
"""What studies measure, and compare with, if nothing else is said: one backward, no copies, nothing predicted."""


def check_at_least_one(settings: Any, *names: str) -> None:
    """Raises: ValueError, with the option, where a field is below 1: one of `names`, or without them any whole number."""
    for name in names or [field.name for field in fields(settings)]:
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) is int and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: must be at least 1")


def check_size(size: str, allowed: Sequence[str]) -> None:
    """Raises: ValueError, when it is not one of them."""
    if size not in allowed:
        raise ValueError(f"--size {size}: allowed: {', '.join(allowed)}")


def check_importance(name: str, copies: bool = False) -> None:
    """Raises: ValueError, when `--importance NAME` is unknown, or runs masked copies where they are not measured."""
    try:
        importance = importance_of(name)
    except ValueError as error:
        raise ValueError(f"--importance {name}: {error}") from None
    if importance.copies and not copies:
        raise ValueError(
            f"--importance {name}: it runs masked copies, not measured here; allowed: {named(copies=False)}"
        )


def model_line(size: str, parameters: int, dtype: str) -> str:
    """What a page says of a model with random weights."""
    vocab = SHAPES[size].vocab
    return f"qwen2 with random weights, {parameters / 1e6:.1f}M parameters (tied embeddings once), vocabulary {vocab}, {dtype}"
