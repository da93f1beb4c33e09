"""Checks a user's own importance on small tensors when a run starts: the same numbers on part of the vocabulary as on all of
it, for a row alone as in a batch, in half precision but for rounding. Each call gets new tensors, as in a pass."""

from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from oar_plugin.credit import called
from oar_plugin.credit.importance.base import Backward, Importance, Parts, Reading, Rows
from oar_plugin.credit.vocabulary import VocabularyShard

ALL, ALONE = slice(None), (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 0))  # a rank may hold no row
WHOLE, SHARDS = (slice(0, 7),), (slice(0, 3), slice(3, 7), slice(7, 7))  # columns of processes; the last one has none
NUMBERS_37 = torch.linspace(-5, 5, 21).sin().view(3, 7)  # a row's mean is not among its numbers
# From 0.1 to 7.4. The last response has no reasoning, like one that is not scored.
SCORE_34 = (2 * NUMBERS_37[:, :4]).exp() * torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
SHARED = " where processes share the vocabulary (see rows.vocabulary)"
HALF = " in half precision (begin with gradient.float() and embedding.float())"


def check(kind: Any) -> None:
    """Raises ValueError, with the fault as its message, if `kind` is not an importance that can be used."""
    _require(isinstance(kind, type) and issubclass(kind, Importance), "it must be a class derived from Importance")
    are_backwards = isinstance(kind.backwards, tuple) and all(isinstance(one, Backward) for one in kind.backwards)
    _require(are_backwards, "backwards must be a tuple of Backward: (Backward(...),)")
    _require(not (kind.copies and (kind.backwards or kind.reads)), "copies=True excludes backwards and reads")
    _require(kind.name and kind.help, "it has no name, or no help")
    are_readings = isinstance(kind.reads, set | frozenset) and kind.reads <= {*get_args(Reading)}
    _require(are_readings, f"reads={kind.reads!r}; allowed: a set of {', '.join(get_args(Reading))}")
    for number, backward in enumerate(kind.backwards):
        for pooled in {False, backward.rows == "probe"}:
            name = "coefficients of pooled rows (no token_N; use Backward('answer'))" if pooled else "coefficients"
            parts: list[Any] = [*((" of a row alone", row) for row in ALONE), (SHARED, ALL, SHARDS)]
            _compare(name, -torch.ones(3, 7), partial(_coefficients, kind, number, pooled), parts)
    if kind.backwards:
        wanted_3 = torch.ones(3) * (1 if kind.combine is Importance.combine else -1)
        # In fp16 a pass gives a gradient in float32 and embeddings in fp16.
        half = [(HALF, ALL, torch.bfloat16, torch.bfloat16), (HALF, ALL, torch.float32, torch.float16)]
        batched = [(" of one row of [B, T, H]", (None, row)) for row in ALONE]
        _compare("score", wanted_3, partial(_score, kind), [*batched, *half])
    if not kind.copies:  # responses without padding at their ends
        responses = [(" of a response alone", part) for part in ((slice(0, 1), ALL), (slice(1, 2), slice(2)))]
        _compare("combine", SCORE_34.sign(), partial(_combine, kind), responses)


def _coefficients(kind: Any, number: int, pooled: bool, part: slice, shards: tuple[slice, ...] = WHOLE) -> Tensor:
    """Of one process, or of several, in turn, with the sums of the round before: in each round one more sum is exact."""
    backward, known = kind.backwards[number], dict[Any, Tensor]()

    def exchange(given: dict[Any, Tensor], reduce: Any, tensor: Tensor) -> Tensor:
        key = len(given), reduce, tensor.shape
        given[key] = tensor.clone()
        return tensor.copy_(known.get(key, tensor))  # in place, as in torch.distributed

    for processes in (WHOLE, shards, shards, shards):
        results, exchanged = list[Tensor](), [dict[Any, Tensor]() for _ in processes]
        for columns, given in zip(processes, exchanged, strict=True):
            logits_NV = NUMBERS_37[part, columns].clone()
            token_N = None if pooled else torch.tensor([0, 3, 6])[part]
            reads = backward.rows == "reasoning" and "entropy" in kind.reads
            entropy_N = torch.tensor([0.2, 1, 5])[part] if reads else None
            clean_NV = logits_NV + 0.1 * logits_NV.cos() if pooled and backward.noise else None
            shard = VocabularyShard(columns.start, *(partial(exchange, given, one) for one in (torch.sum, torch.amax)))
            rows = Rows(logits_NV, token_N, torch.arange(3)[part], entropy_N, clean_NV, vocabulary=shard)
            results.append(kind().coefficients(number, rows))
        _require(len({*map(tuple, exchanged)}) == 1, "other tensors are exchanged on one process than on another")
        known = {key: key[1](torch.stack([one[key] for one in exchanged]), 0) for key in exchanged[0]}
    return results[0] if processes is WHOLE else torch.cat(results, -1)


def _score(kind: Any, part: Any, gradient: Any = torch.float32, embedding: Any = torch.float32) -> Tensor:
    embedding_TH = (NUMBERS_37[part].abs() + 0.5).to(embedding)
    return kind().score(NUMBERS_37[part].to(gradient, copy=True), embedding_TH)


def _combine(kind: Any, part: Any) -> Tensor:
    some_BL = SCORE_34[part]
    readings: dict[str, Tensor] = {n: some_BL.sqrt() * (0.9 if n == "entropy" else -1) for n in kind.reads}
    score_KBL = some_BL ** torch.arange(1, len(kind.backwards) + 1)[:, None, None]
    return kind().combine(Parts(score_KBL, some_BL > 0, some_BL.mul(999).long(), readings))


def _compare(name: str, like: Tensor, method: Any, parts: Any) -> None:
    """Requires results of the shape of `like`, not negative where it is 1 and anything where it is 0, the same for parts."""
    whole = None
    for where, part, *how in (("", ALL), *parts):
        result, wanted = called(name + where, partial(method, part, *how)), like[part]
        fits = isinstance(result, Tensor) and result.shape == wanted.shape
        _require(fits, f"{name}{where} must return a tensor of shape {(*wanted.shape,)}")
        result = result.double().where(wanted != 0, 0)
        whole = result if whole is None else whole
        valid = result.isfinite() & (result * wanted.clamp_min(0) >= 0)
        _require(valid.all() and whole.any(), f"{name}{where} returned numbers not finite, negative, or all 0")
        close = (result - whole[part]).norm() <= (0.05 if where == HALF else 1e-4) * whole.norm()  # bf16 has 8 bits
        _require(close, f"{name}{where} returned other numbers than for all rows")


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
