"""Checks a user's own importance on small tensors when a run starts.

Its methods must give the same on part of the vocabulary as on all of it, for a row alone as in a batch, in bf16 as in float32
but for rounding. Each call gets new tensors, as in a pass: a method may write into its arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from oar_plugin.credit import called
from oar_plugin.credit.importance.base import Backward, Importance, Parts, Reading, Rows
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY, VocabularyShard

ABSENT = "; rows.token_N is None in pooled rows (use Backward('answer')), entropy_N if not read, clean_NV without noise"
ALL, ALONE = slice(None), (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 0))  # a rank may hold no row
SHARDS = slice(0, 3), slice(3, 7), slice(7, 7)  # columns of three processes; the last one has padding only
NUMBERS_37 = torch.linspace(-5, 5, 21).sin().view(3, 7)  # a row's mean is not among its numbers


def check(kind: Any) -> None:
    """Raises ValueError, with the fault as its message, if `kind` is not an importance that can be used."""
    _require(isinstance(kind, type) and issubclass(kind, Importance), "it must be a class derived from Importance")
    are_backwards = isinstance(kind.backwards, tuple) and all(isinstance(one, Backward) for one in kind.backwards)
    _require(are_backwards, "backwards must be a tuple of Backward: (Backward(...),)")
    _require(isinstance(kind.copies, bool), "copies must be True or False")
    _require(kind.name and kind.help, "it has no name, or no help")
    are_readings = isinstance(kind.reads, set | frozenset) and kind.reads <= {*get_args(Reading)}
    _require(are_readings, f"reads={kind.reads!r}; allowed: a set of {', '.join(get_args(Reading))}")
    alone = not (kind.copies and (kind.backwards or kind.reads))
    _require(alone, "masked copies give its scores (copies = True): leave out backwards and reads")
    importance = called(f"{kind.__name__}()", kind)
    for number, backward in enumerate(kind.backwards):
        for pooled in (True, False) if backward.rows == "probe" else (False,):
            _check_coefficients(kind, number, pooled)
    if kind.backwards:
        _check_score(importance)
    if not kind.copies:
        _check_combine(importance)


def _check_coefficients(kind: type[Importance], number: int, pooled: bool) -> None:
    given = list[Tensor]()

    def coefficients(importance: Importance, shard: VocabularyShard, chosen: slice, columns: slice = ALL) -> Tensor:
        backward = kind.backwards[number]
        logits_NV = NUMBERS_37[chosen, columns].clone()
        token_N = None if pooled else torch.tensor([0, 3, 6])[chosen]
        entropy_N = (
            torch.tensor([0.2, 1, 5])[chosen] if backward.rows == "reasoning" and "entropy" in kind.reads else None
        )
        clean_NV = logits_NV + 0.1 * logits_NV.cos() if pooled and backward.noise else None
        rows = Rows(logits_NV, token_N, torch.arange(3)[chosen], entropy_N, clean_NV, vocabulary=shard)
        given.append(logits_NV)
        try:
            return _result("coefficients", partial(importance.coefficients, number, rows), logits_NV.shape)
        except ValueError as fault:
            raise ValueError(f"{fault}{ABSENT if 'NoneType' in str(fault) else ''}") from None

    whole_NV, *alone = (coefficients(kind(), WHOLE_VOCABULARY, chosen) for chosen in (ALL, *ALONE))
    _require(whole_NV.any(), "coefficients are all 0, and so would be every score; return the factor of each logit")
    _require_equal(torch.cat(alone), whole_NV, "coefficients of a row change with the other rows; use that row only")
    try:
        shared_NV = _together([partial(coefficients, kind(), chosen=ALL, columns=columns) for columns in SHARDS])
        _require_equal(shared_NV, whole_NV, "coefficients differ from those on the whole vocabulary")
    except ValueError as fault:
        where = "where processes share the vocabulary (tensor parallelism),"
        if not given[0].equal(NUMBERS_37):
            where = "coefficients writes into rows.logits_NV, of which a process may hold some columns or none:"
        raise ValueError(
            f"{where} {fault}; write "
            "rows.vocabulary.softmax(rows.logits_NV) in place of rows.logits_NV.softmax(-1), rows.vocabulary.total(x) and "
            "largest(x) for the sum and the maximum of x over all processes, rows.signs() for random signs, and "
            "rows.vocabulary.subtract_one_at(x, rows.token_N) for the columns of tokens; a process may hold no column"
        ) from None


def _together(processes: list[Callable[[VocabularyShard], Tensor]]) -> Tensor:
    """Returns the results of all processes, `[N, V]`. A run ends at the first sum or maximum that is not known."""

    class Waits(BaseException):
        """No `except Exception` of a method catches it."""

    known = list[Tensor]()
    while True:
        done, waiting = list[Tensor](), list[tuple[str, Tensor]]()
        for process, columns in zip(processes, SHARDS, strict=True):
            left = [tensor.clone() for tensor in known]

            def exchange(reduce: str, tensor: Tensor, left: list[Tensor] = left) -> Tensor:
                if not left:
                    raise Waits(reduce, tensor)
                return left.pop(0)

            shard = VocabularyShard(columns.start, partial(exchange, "sum"), partial(exchange, "amax"))
            try:
                done.append(process(shard))
            except Waits as waits:
                waiting.append(waits.args)
        if not waiting:
            return torch.cat(done, -1)
        kinds = {(reduce, tensor.shape) for reduce, tensor in waiting}
        _require(not done and len(kinds) == 1, "coefficients exchange other tensors on one process than on another")
        known.append(getattr(torch.stack([tensor for _, tensor in waiting]), waiting[0][0])(0))


def _check_score(importance: Importance) -> None:
    signed = type(importance).combine is not Importance.combine  # else the score is the importance
    single, half, bfloat = torch.float32, torch.float16, torch.bfloat16

    def score(chosen: slice | None, gradient: torch.dtype = single, embedding: torch.dtype = single) -> Tensor:
        gradient_TH = NUMBERS_37[chosen]
        given = gradient_TH.to(gradient, copy=True), (gradient_TH.abs() + 0.5).to(embedding)
        return _result("score", partial(importance.score, *given), gradient_TH.shape[:-1], signed)

    score_T, (batch_T,), *alone = (score(chosen) for chosen in (ALL, None, *ALONE))
    _require(score_T.any(), "score returned 0 for every token; no token would matter more than another")
    other_shape = "score of a token changes with the other tokens or the shape of the batch, [T, H] or [B, T, H]"
    _require_equal(torch.cat([batch_T, *alone]), score_T.repeat(2), other_shape)
    # In fp16 a pass gives a gradient in float32 and embeddings in fp16. bf16 has 8 bits.
    rounded_T = torch.cat([score(ALL, bfloat, bfloat), score(ALL, single, half)])
    other_type = "score differs in bf16 by more than rounding; begin with gradient.float() and embedding.float()"
    _require_equal(rounded_T, score_T.repeat(2), other_type, 0.05)


def _check_combine(importance: Importance) -> None:
    # The last response has no reasoning, like one that is not scored.
    reasoning_BL = torch.tensor([[False, True, True, True], [True, True, False, False], [False] * 4])

    def combine(*cut: slice) -> Tensor:  # some responses, without padding at their ends
        # From 0.1 to 7.4, other numbers for each backward and reading: what a difference or a threshold makes is not all 0.
        keep_BL, some_BL = reasoning_BL[cut].clone(), (reasoning_BL * (2 * NUMBERS_37[:, :4]).exp())[cut]
        readings: dict[str, Tensor] = {n: some_BL.sqrt() * (0.9 if n == "entropy" else -1) for n in importance.reads}
        score_KBL = some_BL ** torch.arange(1, len(importance.backwards) + 1)[:, None, None]
        parts = Parts(score_KBL, keep_BL, torch.arange(12).view(3, 4)[cut].clone(), readings)
        return _result("combine", partial(importance.combine, parts), keep_BL.shape, False, reasoning_BL[cut])

    whole_BL = combine(ALL, ALL)
    some = whole_BL[reasoning_BL].any()
    _require(some, "combine returned 0 for every token, as in plain GRPO")
    for cut in ((slice(0, 1), ALL), (slice(1, 2), slice(2))):
        other_rows = "combine gives a response other numbers in a batch than alone; use its own tokens only"
        _require_equal(combine(*cut)[reasoning_BL[cut]], whole_BL[cut][reasoning_BL[cut]], other_rows)


def _result(name: str, call: Callable[[], Any], shape: torch.Size, signed: bool = True, where: Any = ...) -> Tensor:
    """What a user's method returns: a tensor of this shape, which `where` is finite and, if not `signed`, not negative."""
    result = called(name, call)
    returned = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    _require(returned == tuple(shape), f"{name} returned {returned}, wanted a tensor of shape {tuple(shape)}")
    _require(result[where].isfinite().all(), f"{name} returned numbers that are not finite")
    _require(signed or (result[where] >= 0).all(), f"{name} returned negative numbers; an importance is not negative")
    return result


def _require_equal(one: Tensor, other: Tensor, otherwise: str, relative: float = 1e-4) -> None:
    """The tensors must be equal but for a share of the largest number."""
    tolerance = max(1e-12, relative * other.double().abs().amax().item())
    _require(torch.allclose(one.double(), other.double(), rtol=0, atol=tolerance), otherwise)


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
