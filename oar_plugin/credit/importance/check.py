"""Can an importance that a user brings work? Found out at the start of a run, on a few small numbers."""

from __future__ import annotations

from typing import get_args, get_type_hints

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Copies, Importance, Parts, Reading, Rows
from oar_plugin.credit.noise import position_seeds

_ROWS, _VOCABULARY, _HIDDEN = 3, 7, 5


def problems(kind: object) -> list[str]:
    """What is missing or wrong, a phrase each; empty for an importance that can be used."""
    if not isinstance(kind, type) or not issubclass(kind, Importance):
        return ["it must be a class derived from oar_plugin.credit.importance.Importance"]
    starts, readings = get_args(get_type_hints(Backward)["rows"]), get_args(Reading)
    if not (isinstance(kind.backwards, tuple) and all(isinstance(b, Backward) for b in kind.backwards)):
        return ["backwards must be a tuple of Backward: (Backward(...),)"]
    if not (kind.copies is None or isinstance(kind.copies, Copies)):
        return ["copies must be None or Copies(...)"]
    missing = [f"it has no {name}" for name in ("name", "help") if not getattr(kind, name, "")]
    missing += [
        f"a backward starts from {b.rows!r}; allowed: {', '.join(starts)}"
        for b in kind.backwards
        if b.rows not in starts
    ]
    if not (isinstance(kind.reads, set | frozenset) and kind.reads <= {*readings}):
        missing.append(f"reads={kind.reads!r}; allowed: a set of {', '.join(readings)}")
    wanted = [("coefficients", "what each logit is multiplied by"), ("score", "a number a token from its gradient")]
    if kind.backwards:
        missing += [
            f"it has backwards and no method {method} ({what})" for method, what in wanted if not _has(kind, method)
        ]
    if len(kind.backwards) > 1 and not _has(kind, "combine"):
        missing.append(
            f"it has {len(kind.backwards)} backwards and no method combine that makes one importance of them"
        )
    if not kind.backwards and kind.copies is None and not _has(kind, "combine"):
        missing.append("it has no backwards, no copies and no method combine: nothing makes its scores")
    if kind.copies is not None and kind.copies.by_gradient and not kind.backwards:
        missing.append("its copies are chosen by gradient, and it has no backwards")
    if missing:
        return missing
    try:
        importance = kind()
    except Exception as error:  # a user's class runs code of its own
        return [f"{kind.__name__}() failed: {error!r}"]
    return _tried(importance)


def _has(kind: type[Importance], method: str) -> bool:
    return getattr(kind, method) is not getattr(Importance, method)


def _tried(importance: Importance) -> list[str]:
    """What is wrong with what its methods return."""
    found = []
    for number, backward in enumerate(importance.backwards):
        for pooled in (True, False) if backward.rows == "probe" else (False,):
            rows = _rows(importance, backward, pooled)
            found += _call("coefficients", rows.logits_NV.shape, importance.coefficients, number, rows)
    if importance.backwards:
        gradient_TH = torch.linspace(-1, 1, 2 * _HIDDEN).view(2, _HIDDEN)
        # What no combine turns into something else is the importance itself.
        signed = _has(type(importance), "combine")
        for direction in (1, -1):
            arguments = direction * gradient_TH, gradient_TH + 0.5
            found += _call("score", gradient_TH.shape[:1], importance.score, *arguments, signed=signed)
    reasoning_BL = torch.tensor([[False, True, True, True], [True, True, False, False]])
    if importance.copies is None:
        parts = _parts(importance, reasoning_BL)
        found += _call("combine", reasoning_BL.shape, importance.combine, parts, where=reasoning_BL, signed=False)
    return list(dict.fromkeys(found))


def _rows(importance: Importance, backward: Backward, pooled: bool) -> Rows:
    logits_NV = torch.linspace(-2, 2, _ROWS * _VOCABULARY).view(_ROWS, _VOCABULARY)
    reads = backward.rows == "reasoning" and "entropy" in importance.reads
    return Rows(
        logits_NV,
        None if pooled else torch.arange(_ROWS),
        torch.arange(_ROWS),
        torch.ones(_ROWS) if reads else None,
        logits_NV + 0.1 if pooled and backward.noise else None,
    )


def _parts(importance: Importance, reasoning_BL: Tensor) -> Parts:
    seed_BL = position_seeds(torch.zeros(reasoning_BL.numel(), dtype=torch.long), torch.arange(reasoning_BL.numel()))
    some_BL = reasoning_BL * torch.linspace(0.1, 0.9, reasoning_BL.numel()).view_as(reasoning_BL)
    return Parts(
        some_BL.expand(len(importance.backwards), *some_BL.shape),
        reasoning_BL,
        some_BL,
        -some_BL,
        seed_BL.view_as(reasoning_BL),
    )


def _call(
    method: str,
    shape: torch.Size,
    function: object,
    *arguments: object,
    where: Tensor | None = None,
    signed: bool = True,
) -> list[str]:
    try:
        result = function(*arguments)  # type: ignore[operator]
    except Exception as error:  # a user's method runs code of its own
        return [f"{method} failed: {error!r}"]
    if not isinstance(result, Tensor) or result.shape != shape:
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return [f"{method} returned {shown}, wanted a tensor of shape {tuple(shape)}"]
    read = result if where is None else result[where]
    if not torch.isfinite(read).all():
        return [f"{method} returned numbers that are not finite"]
    if not signed and (read < 0).any():
        return [f"{method} returned negative numbers; an importance is not negative"]
    return []
