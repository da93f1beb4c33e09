"""Estimators of importance under one signature, and what each of them computes.

An estimator is a function of a model and a micro-batch that returns a score for every token, `[B, T]`; only the scores of
reasoning tokens are read, and only their order and size within a response matter. Those here are the package's importances. A
file given with `--also` adds others: it has a dictionary `ESTIMATORS` of such functions by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.fidelity.attention import attention_patching
from benchmarks.fidelity.responses import MicroBatch
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.credit.importance.oar_p import OarP
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Perturbation, Request
from oar_plugin.passes.taps import unwrapped

Score: TypeAlias = Callable[[nn.Module, MicroBatch], Tensor]
"""Scores `[B, T]` of a micro-batch; the model is in eval mode, and what was changed on it must be taken back."""

REFERENCE = OarP.name
"""Exact OAR-P, what the others estimate."""

DRAWS = (1, 4, 16)
SPANS = (2, 4, 8)
BUDGETS = (0.1, 0.3, 0.5)


def by_importance(
    model: nn.Module,
    batch: MicroBatch,
    importance: str = REFERENCE,
    draws: int = 1,
    budget: float | None = None,
    span: int = 1,
    sampled: bool = False,
) -> Tensor:
    """An importance of the package, as an engine computes it.

    Args:
        model: in eval mode.
        batch: what is scored.
        importance: see `importance_of`.
        draws: of signs or noise.
        budget: of copies; None: the importance's own.
        span: tokens that one copy replaces.
        sampled: by drawn tokens in place of the replacement token.
    """
    copies, perturbation = importance_of(importance).copies, None
    if copies is not None:
        token = None if sampled else batch.replacement_token
        perturbation = Perturbation(copies.budget if budget is None else budget, span, token)
    request = Request(importance, batch.probe, num_draws=draws, seed=batch.seed, perturbation=perturbation)
    return batch_importance(model, request, batch.token_BT, batch.segments_BT, batch.mask_BT)


# ---- the list


@dataclass(frozen=True)
class Estimator:
    """One way to estimate importance.

    Attributes:
        name: unique.
        score: the function.
        about: one line for readers.
        added: it came with `--also`.
        shown: in plots of curves and in examples, which have no room for all.
    """

    name: str
    score: Score
    about: str
    added: bool = False
    shown: bool = False


def package_estimators() -> list[Estimator]:
    """Every importance of the package, some of them at several costs, and attention patching; the reference first."""
    attention = Estimator("attention", attention_patching, _first_line(attention_patching), shown=True)
    every = [*(one for name in IMPORTANCES for one in _variants(name)), attention]
    return sorted(every, key=lambda estimator: estimator.name != REFERENCE)


def _variants(name: str) -> Iterator[Estimator]:
    """One importance: with several budgets, replacements or numbers of draws, as it has them."""
    importance = IMPORTANCES[name]

    def variant(suffix: str, about: str, shown: bool = False, **settings: Any) -> Estimator:
        return Estimator(f"{name}{suffix}", partial(by_importance, importance=name, **settings), about, shown=shown)

    if importance.copies is not None and importance.copies.by_gradient:
        for budget in BUDGETS:
            yield variant(
                f" {budget}",
                f"{importance.help} Copies of {budget:.0%}.",
                budget == importance.copies.budget,
                budget=budget,
            )
    elif importance.copies is not None:
        yield variant("", importance.help, shown=True)
        yield variant(" sampled", "the same, replaced by a drawn token", sampled=True)
        for span in SPANS:
            yield variant(f" span {span}", f"the same, {span} tokens replaced at a time", span=span)
    elif importance.backwards:
        for draws in DRAWS:
            about = importance.help if draws == 1 else f"the same, mean of {draws} draws"
            yield variant(f" {draws}", about, draws == 1, draws=draws)
    else:
        yield variant("", importance.help, shown=True)


def load_estimators(file: Path) -> list[Estimator]:
    """The estimators of a file given with `--also`.

    Raises:
        ValueError: it cannot be imported, or has no dictionary `ESTIMATORS` of functions by name.
    """
    specification = importlib.util.spec_from_file_location(f"oar_candidates_{file.stem}", file)
    if specification is None or specification.loader is None or not file.is_file():
        raise ValueError(f"--also {file}: not a Python file")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # a user's file runs arbitrary code
        raise ValueError(f"--also {file}: cannot be imported: {error!r}") from error
    functions = getattr(module, "ESTIMATORS", None)
    if not isinstance(functions, dict) or not functions or not all(callable(score) for score in functions.values()):
        raise ValueError(f"--also {file}: needs a dictionary ESTIMATORS of functions (model, batch) -> scores by name")
    return [Estimator(str(name), score, _first_line(score), True) for name, score in functions.items()]


def _first_line(score: Any) -> str:
    return str(getattr(score, "func", score).__doc__ or "").strip().split("\n")[0]


# ---- what they compute


@dataclass
class Work:
    """Tokens that went through the model's layers, in passes through all of them.

    Use as a context; it hooks the decoder's layers. Whole-model passes over B x T tokens count `B * T`; a backward that
    stops half-way down counts half.

    Attributes:
        model: causal LM.
        forward: token passes forward.
        backward: token passes backward.
    """

    model: nn.Module
    forward: float = 0.0
    backward: float = 0.0
    _handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def __enter__(self) -> Work:
        layers = decoder_layers(self.model)
        for layer in layers:
            self._handles.append(layer.register_forward_hook(partial(self._count, 1 / len(layers))))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _count(self, share: float, layer: nn.Module, args: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        tokens = hidden.numel() // hidden.shape[-1] * share
        self.forward += tokens
        if hidden.requires_grad:

            def back(gradient: Tensor) -> None:
                self.backward += tokens

            hidden.register_hook(back)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's transformer layers.

    Raises:
        ValueError: they are not where HuggingFace's decoders have them.
    """
    inner: Any = unwrapped(model)
    layers = getattr(inner.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(inner).__name__}: no list of decoder layers (get_decoder().layers) to count work in")
    return layers
