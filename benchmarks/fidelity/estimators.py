"""Estimators of importance under one signature, and what each of them computes."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from benchmarks.fidelity.attention import attention_patching
from benchmarks.fidelity.responses import MicroBatch
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Perturbation, Request
from oar_plugin.passes.taps import unwrapped

Score: TypeAlias = Callable[[nn.Module, MicroBatch], Tensor]
"""Scores `[B, T]` of a micro-batch, of which those of reasoning tokens are read, and only their order and size within a
response. The model is in eval mode, and what was changed on it must be taken back."""

REFERENCE = "oar_p"
"""Exact OAR-P, what the others estimate."""


def by_importance(
    model: nn.Module,
    batch: MicroBatch,
    importance: str,
    draws: int = 1,
    budget: float | None = None,
    span: int = 1,
    sampled: bool = False,
) -> Tensor:
    """An importance of the package, as an engine computes it; `sampled`: copies hold drawn tokens."""
    copies, perturbation = importance_of(importance).copies, None
    if copies is not None:
        token = None if sampled else batch.replacement_token
        perturbation = Perturbation(copies.budget if budget is None else budget, span, token)
    request = Request(importance, batch.probe, num_draws=draws, seed=batch.seed, perturbation=perturbation)
    return batch_importance(model, request, batch.token_BT, batch.segments_BT, batch.mask_BT)


def package_estimators() -> dict[str, Score]:
    """The package's importances, each at its own cost first and then at others, and attention patching, by name."""
    found: dict[str, Score] = {}
    for name, importance in IMPORTANCES.items():
        copies = importance.copies
        variants: dict[str, dict[str, Any]] = {"": {}}
        if copies is not None and copies.by_gradient:
            variants = {f" {budget}": {"budget": budget} for budget in (copies.budget, 0.1, 0.5)}
        elif copies is not None:
            variants |= {" sampled": {"sampled": True}, **{f" span {span}": {"span": span} for span in (2, 4, 8)}}
        elif importance.backwards:
            variants = {f" {draws}": {"draws": draws} for draws in (1, 4, 16)}
        found |= {name + suffix: partial(by_importance, importance=name, **kw) for suffix, kw in variants.items()}
    return {**found, "attention": attention_patching}


def loaded_estimators(files: Sequence[Path]) -> dict[str, Score]:
    """Those of files.

    Raises:
        ValueError: a file cannot be imported, has no dictionary `ESTIMATORS`, or has a name that is taken.
    """
    found: dict[str, Score] = {}
    for file in files:
        specification = importlib.util.spec_from_file_location(f"estimators_of_{file.stem}", file)
        if specification is None or specification.loader is None or not file.is_file():
            raise ValueError(f"--also {file}: not a Python file")
        module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
        try:
            specification.loader.exec_module(module)
        except Exception as error:  # a user's file runs code of its own
            raise ValueError(f"--also {file}: cannot be imported: {error!r}") from error
        functions = getattr(module, "ESTIMATORS", None)
        if not isinstance(functions, dict) or not functions or not all(map(callable, functions.values())):
            raise ValueError(
                f"--also {file}: needs a dictionary ESTIMATORS of functions (model, batch) -> scores by name"
            )
        if taken := [name for name in functions if name in {**package_estimators(), **found}]:
            raise ValueError(f"--also {file}: the name {taken[0]!r} is taken; give the estimator another one")
        found |= functions
    return found


@contextmanager
def counted_work(model: nn.Module) -> Iterator[Counter[str]]:
    """Count tokens `forward` and `backward`: a pass over B x T counts `B * T`, a backward that stops half-way down half.

    Raises:
        ValueError: the layers are not where HuggingFace's decoders have them.
    """
    inner: Any = unwrapped(model)
    layers = getattr(inner.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(inner).__name__}: no list of decoder layers (get_decoder().layers) to count work in")
    work: Counter[str] = Counter()

    def count(layer: nn.Module, args: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        tokens: Any = hidden.numel() // hidden.shape[-1] / len(layers)
        work["forward"] += tokens
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: work.update(backward=tokens))

    handles = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield work
    finally:
        for handle in handles:
            handle.remove()
