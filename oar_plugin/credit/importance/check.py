"""Checks a user's own importance on small tensors when a run starts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Copies, Importance, Parts, Reading, Rows
from oar_plugin.credit.noise import position_seeds


def problems(kind: object) -> list[str]:
    """The faults of an importance, one phrase each; empty for an importance that can be used."""
    if not isinstance(kind, type) or not issubclass(kind, Importance):
        return ["it must be a class derived from oar_plugin.credit.importance.Importance"]
    if not (isinstance(kind.backwards, tuple) and all(isinstance(b, Backward) for b in kind.backwards)):
        return ["backwards must be a tuple of Backward: (Backward(...),)"]
    if not (kind.copies is None or isinstance(kind.copies, Copies)):
        return ["copies must be None or Copies(...)"]
    if missing := list(_missing(kind)):
        return missing
    try:
        importance = kind()
    except Exception as error:  # a user's class runs code of its own
        return [f"{kind.__name__}() failed: {error!r}"]
    return list(dict.fromkeys(_tried(importance)))


def _has(kind: type[Importance], method: str) -> bool:
    return getattr(kind, method) is not getattr(Importance, method)


def _missing(kind: type[Importance]) -> Iterator[str]:
    yield from (f"it has no {name}" for name in ("name", "help") if not getattr(kind, name))
    starts, readings, count = get_args(get_type_hints(Backward)["rows"]), get_args(Reading), len(kind.backwards)
    for backward in kind.backwards:
        if backward.rows not in starts:
            yield f"a backward starts from {backward.rows!r}; allowed: {', '.join(starts)}"
    if not (isinstance(kind.reads, set | frozenset) and kind.reads <= {*readings}):
        yield f"reads={kind.reads!r}; allowed: a set of {', '.join(readings)}"
    if count and not _has(kind, "coefficients"):
        yield "it has backwards and no method coefficients (the factor of each logit)"
    if count and not _has(kind, "score"):
        yield "it has backwards and no method score (one number per token from its gradient)"
    if count > 1 and not _has(kind, "combine"):
        yield f"it has {count} backwards and no method combine that makes one importance of them"
    if not count and kind.copies is None and not _has(kind, "combine"):
        yield "it has no backwards, no copies and no method combine: nothing makes its scores"
    if not count and kind.copies is not None and kind.copies.by_gradient:
        yield "its copies are chosen by gradient, and it has no backwards"


def _tried(importance: Importance) -> Iterator[str]:
    """The faults of the values that its methods return."""
    gradient_TH = torch.linspace(-1, 1, 10).view(2, 5)
    for number, backward in enumerate(importance.backwards):
        reads = backward.of_reasoning and "entropy" in importance.reads
        for pooled in (True, False) if backward.rows == "probe" else (False,):
            for count in (3, 0):  # a rank may hold no row
                logits_NV, index_N = torch.linspace(-2, 2, count * 7).view(count, 7), torch.arange(count)
                clean_NV = logits_NV + 0.1 if pooled and backward.noise else None
                rows = Rows(
                    logits_NV, None if pooled else index_N, index_N, torch.ones(count) if reads else None, clean_NV
                )
                yield from _fault("coefficients", partial(importance.coefficients, number, rows), (count, 7))
    # Without a combine of its own, the score is the importance.
    signed = _has(type(importance), "combine")
    for sign in (1, -1) if importance.backwards else ():
        yield from _fault("score", partial(importance.score, sign * gradient_TH, gradient_TH + 0.5), (2,), signed)
    if importance.copies is None or importance.backwards:
        # The last response has no reasoning, like one that is not scored.
        reasoning_BL = torch.tensor([[False, True, True, True], [True, True, False, False], [False] * 4])
        some_BL = reasoning_BL * torch.linspace(0.1, 0.9, 12).view(3, 4)
        seed_BL = position_seeds(torch.zeros(12, dtype=torch.long), torch.arange(12)).view(3, 4)
        score_KBL = some_BL.expand(len(importance.backwards), 3, 4)
        parts = Parts(score_KBL, reasoning_BL, some_BL, -some_BL, seed_BL)
        yield from _fault("combine", lambda: importance.combine(parts), (3, 4), signed=False, where=reasoning_BL)


def _fault(
    method: str, call: Callable[[], Tensor], shape: tuple[int, ...], signed: bool = True, where: Tensor | None = None
) -> Iterator[str]:
    try:
        result = call()
    except Exception as error:  # a user's method runs code of its own
        yield f"{method} failed: {error!r}"
        return
    if not isinstance(result, Tensor) or result.shape != shape:
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        yield f"{method} returned {shown}, wanted a tensor of shape {shape}"
        return
    read = result if where is None else result[where]
    if not torch.isfinite(read).all():
        yield f"{method} returned numbers that are not finite"
    elif not signed and (read < 0).any():
        yield f"{method} returned negative numbers; an importance is not negative"
