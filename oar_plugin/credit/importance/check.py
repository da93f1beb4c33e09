"""Checks a user's own importance on small tensors when a run starts.

Its methods must give the same on every layout: on a part of the vocabulary as on all of it, for a row alone as in a batch, in
bf16 as in float32 but for rounding.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from oar_plugin.credit.importance.base import Backward, Copies, Importance, Parts, Reading, Rows, Shown
from oar_plugin.credit.noise import position_seeds
from oar_plugin.credit.vocabulary import VocabularyShard

CLOSE = 1e-4
"""Largest relative difference between two layouts in float32."""
CLOSE_BF16 = 0.05
"""Largest relative difference between bf16, which has 8 bits, and float32."""


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
        return [f"{kind.__name__}() failed: {_shown(error)}"]
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
    if not (isinstance(kind.contexts, tuple) and {*kind.contexts} <= {*get_args(Shown)}):
        yield f"contexts={kind.contexts!r}; allowed: a tuple of {', '.join(get_args(Shown))}"
    elif kind.contexts and (kind.copies is not None or not _has(kind, "contrast")):
        yield "it has contexts: it must have a method contrast, and no copies"
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


class _Fault(Exception):
    """A fault of a user's method."""


def _tried(importance: Importance) -> Iterator[str]:
    """The faults of the values that its methods return."""
    for number, backward in enumerate(importance.backwards):
        reads = backward.of_reasoning and "entropy" in importance.reads
        for pooled in (True, False) if backward.rows == "probe" else (False,):
            for count in (3, 0):  # a rank may hold no row
                logits_NV = _irregular(count, 7)
                rows = Rows(
                    logits_NV,
                    None if pooled else torch.tensor([0, 3, 6])[:count],
                    torch.arange(count),
                    torch.ones(count) if reads else None,
                    logits_NV + 0.1 * logits_NV.cos() if pooled and backward.noise else None,
                )
                yield from _faults(_try_coefficients, type(importance), number, rows)
    # Without a combine of its own, the score is the importance.
    signed = _has(type(importance), "combine")
    for sign in (1, -1) if importance.backwards else ():
        yield from _faults(_try_score, importance, sign * _irregular(2, 5), signed)
    if importance.contexts:
        yield from _faults(_try_contrast, importance)
    if importance.copies is None or importance.backwards:
        yield from _faults(_try_combine, importance)


def _irregular(rows: int, columns: int) -> Tensor:
    """Numbers between -1 and 1, `[rows, columns]`; no row's mean is one of its numbers, where rounding would decide."""
    return torch.linspace(-5, 5, rows * columns).sin().view(rows, columns)


def _faults(attempt: Callable[..., None], *given: Any) -> Iterator[str]:
    try:
        attempt(*given)
    except _Fault as fault:
        yield str(fault)


def _try_coefficients(kind: type[Importance], number: int, rows: Rows) -> None:
    count, width = rows.logits_NV.shape
    importance = kind()

    def coefficients(part: Rows, shape: tuple[int, int], importance: Importance = importance) -> Tensor:
        return _result("coefficients", partial(importance.coefficients, number, part), shape)

    whole_NV = coefficients(_rows(rows), (count, width))
    by_row = [coefficients(_rows(rows, slice(row, row + 1)), (1, width)) for row in range(count)]
    if count and not _close(torch.cat(by_row), whole_NV):
        raise _Fault("coefficients of a row change with the other rows; they may depend on that row only")
    # The last process has padding only.
    shards = slice(0, width // 2), slice(width // 2, width), slice(width, width)
    try:
        if not _close(_on_shards(kind, coefficients, rows, shards), whole_NV):
            raise _Fault("coefficients differ from those on the whole vocabulary")
    except _Fault as fault:
        raise _Fault(
            f"where processes share the vocabulary (tensor parallelism), {fault}; write "
            "rows.vocabulary.softmax(rows.logits_NV) in place of rows.logits_NV.softmax(-1), rows.vocabulary.total(x) for the "
            "sum of x over all processes, rows.vocabulary.largest(x) for its maximum, rows.signs() for random signs, and "
            "rows.vocabulary.subtract_one_at(x, rows.token_N) for the columns of tokens; a process may hold no column"
        ) from None


def _try_score(importance: Importance, gradient_TH: Tensor, signed: bool) -> None:
    embedding_TH = gradient_TH.abs() + 0.5

    def score(shape: tuple[int, ...], rows: Any = slice(None), *dtypes: torch.dtype) -> Tensor:
        gradient, embedding = dtypes or (torch.float32, torch.float32)
        # A clone for each trial: a method may write into its arguments.
        given = gradient_TH[rows].to(gradient, copy=True), embedding_TH[rows].to(embedding, copy=True)
        return _result("score", partial(importance.score, *given), shape, signed)

    score_T = score((2,))
    alone_T = torch.cat([score((1,), [row]) for row in range(2)])
    if not (_close(score((1, 2), None)[0], score_T) and _close(alone_T, score_T)):
        raise _Fault("score of a token changes with the other tokens or the shape of the batch, [T, H] or [B, T, H]")
    # In fp16 a pass gives a gradient in float32 and embeddings in fp16.
    for dtypes in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)):
        if not _close(score((2,), slice(None), *dtypes), score_T, CLOSE_BF16):
            raise _Fault(
                "score differs in bf16 by more than rounding; begin with gradient.float() and embedding.float()"
            )


def _try_combine(importance: Importance) -> None:
    # The last response has no reasoning, like one that is not scored.
    reasoning_BL = torch.tensor([[False, True, True, True], [True, True, False, False], [False] * 4])
    some_BL = reasoning_BL * (0.5 + 0.4 * _irregular(3, 4))
    seed_BL = position_seeds(torch.zeros(12, dtype=torch.long), torch.arange(12)).view(3, 4)

    def combine(*cut: slice) -> Tensor:
        """The importance of some responses, without padding at their ends. A pass makes new tensors for each call, too."""
        some, keep = some_BL[cut], reasoning_BL[cut].clone()
        readings: dict[str, Tensor] = {name: -some if name == "log_prob" else some.clone() for name in importance.reads}
        scores = some.repeat(len(importance.backwards), 1, 1)
        parts = Parts(scores, keep, seed_BL[cut].clone(), readings)
        return _result("combine", lambda: importance.combine(parts), tuple(some.shape), False, reasoning_BL[cut])

    whole_BL = combine(slice(None), slice(None))
    for row, length in enumerate((4, 2)):
        cut = slice(row, row + 1), slice(length)
        keep = reasoning_BL[cut]
        if not _close(combine(*cut)[keep], whole_BL[cut][keep]):
            raise _Fault("combine gives a response other numbers in a batch than alone; use its own tokens only")


def _try_contrast(importance: Importance) -> None:
    own_L, other_L = torch.linspace(0, 1, 5), torch.linspace(0, 1, 5).square()
    for sign in (1, -1):
        call = partial(
            importance.contrast, own_L.clone(), {shown: other_L.clone() for shown in importance.contexts}, sign
        )
        _result("contrast", call, (5,), False)


def _result(
    method: str, call: Callable[[], Tensor], shape: tuple[int, ...], signed: bool = True, where: Tensor | None = None
) -> Tensor:
    """What a user's method returns. _Fault: it raises, or the tensor cannot be used where `where` is true."""
    try:
        result = call()
    except Exception as error:  # a user's method runs code of its own
        raise _Fault(f"{method} failed: {_shown(error)}") from error
    if not isinstance(result, Tensor) or result.shape != shape:
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise _Fault(f"{method} returned {shown}, wanted a tensor of shape {shape}")
    read = result if where is None else result[where]
    if not torch.isfinite(read).all():
        raise _Fault(f"{method} returned numbers that are not finite")
    if not signed and (read < 0).any():
        raise _Fault(f"{method} returned negative numbers; an importance is not negative")
    return result


def _shown(error: Exception) -> str:
    """An error, with file and line of the user's code that raised it or called what raised it."""
    package = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(package)]
    return f"{error!r}" + (f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else "")


def _close(one: Tensor, other: Tensor, relative: float = CLOSE) -> bool:
    """Whether two tensors are equal but for a share of the largest number."""
    one, other = one.double(), other.double()
    largest = other.abs().amax().item() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=max(1e-12, relative * largest))


def _rows(rows: Rows, chosen: slice = slice(None), columns: slice = slice(None), **changes: Any) -> Rows:
    """Some rows and columns, in tensors of their own: a method may write into its arguments."""
    return replace(
        rows,
        logits_NV=rows.logits_NV[chosen, columns].clone(),
        token_N=None if rows.token_N is None else rows.token_N[chosen].clone(),
        seed_N=rows.seed_N[chosen].clone(),
        entropy_N=None if rows.entropy_N is None else rows.entropy_N[chosen].clone(),
        clean_NV=None if rows.clean_NV is None else rows.clean_NV[chosen, columns].clone(),
        **changes,
    )


class _Waits(BaseException):
    """A process cannot go on before all have given their tensor to a sum or maximum. No `except Exception` catches it."""

    def __init__(self, reduce: Literal["sum", "amax"], tensor: Tensor) -> None:
        self.reduce, self.tensor = reduce, tensor


def _on_shards(
    kind: type[Importance], coefficients: Callable[..., Tensor], rows: Rows, shards: tuple[slice, ...]
) -> Tensor:
    """Returns the coefficients from processes that share the vocabulary, `[N, V]`.

    The processes are runs of the method, one after the other. A run ends at the first sum or maximum that needs the other
    processes' tensors, and is repeated with the result.
    """
    results, objects = list[Tensor](), [kind() for _ in shards]
    while True:
        waiting, done = list[_Waits](), list[Tensor]()
        for columns, importance in zip(shards, objects, strict=True):
            known = iter(results)

            def reduced(reduce: Literal["sum", "amax"], tensor: Tensor, known: Iterator[Tensor] = known) -> Tensor:
                result = next(known, None)
                if result is None:
                    raise _Waits(reduce, tensor)
                return result.clone()

            vocabulary = VocabularyShard(columns.start, partial(reduced, "sum"), partial(reduced, "amax"))
            part = _rows(rows, columns=columns, vocabulary=vocabulary)
            try:
                done.append(coefficients(part, tuple(part.logits_NV.shape), importance))
            except _Waits as waits:
                waiting.append(waits)
        if not waiting:
            return torch.cat(done, -1)
        if done or len({(one.reduce, one.tensor.shape) for one in waiting}) > 1:
            raise _Fault("coefficients exchange other tensors on one process than on another")
        results.append(getattr(torch.stack([one.tensor for one in waiting]), waiting[0].reduce)(0))
