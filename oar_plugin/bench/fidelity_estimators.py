"""Estimators of importance under one signature, and what each of them computes.

An estimator is a function of a model and a micro-batch that returns a score for every token, `[B, T]`; only the scores of
reasoning tokens are read, and only their order and size within a response matter. Those here are the package's own. A
file given with `--also` adds others: it has a dictionary `ESTIMATORS` of such functions by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from oar_plugin.bench.fidelity_attention import attention_patching
from oar_plugin.bench.fidelity_responses import MicroBatch
from oar_plugin.bench.gradient_pass import gradient_scores
from oar_plugin.bench.passes import log_prob_and_entropy
from oar_plugin.config import Importance
from oar_plugin.credit.noise import gaussian, position_seeds
from oar_plugin.credit.perturbation import search, units
from oar_plugin.passes.masked_copies import MaskedCopies, Replacements
from oar_plugin.passes.taps import unwrapped

Score: TypeAlias = Callable[[nn.Module, MicroBatch], Tensor]
"""Scores `[B, T]` of a micro-batch; the model is in eval mode, and what was changed on it must be taken back."""

REFERENCE = "oar_p"
"""Exact OAR-P, what the others estimate."""

_COPY_TOKENS = 2048


# ---- the package's estimators


def by_gradient(model: nn.Module, batch: MicroBatch, importance: Importance, draws: int) -> Tensor:
    """`fisher` or `oar_g`, as an engine computes them."""
    return gradient_scores(model, batch.token_BT, batch.scorer(importance, draws))


def by_copies(
    model: nn.Module,
    batch: MicroBatch,
    replacement: str = "pad",
    span: int = 1,
    budget: float = 1.0,
    gradient: Score | None = None,
) -> Tensor:
    """`oar_p`, or `hybrid` where a budget goes to the units with the largest gradient score."""
    token = {"pad": batch.replacement_token, "mean": batch.mean_token, "sampled": None}[replacement]
    copies = MaskedCopies(model, batch.probe, Replacements(token, batch.seed), _COPY_TOKENS)
    gradient_BT = None if gradient is None else gradient(model, batch)
    scores_BT = torch.zeros(batch.token_BT.shape, dtype=torch.float64)
    for row, response in enumerate(batch.responses):
        begin, end = response.prompt_length, len(response.token_T)
        reasoning = batch.reasoning_BT[row, begin:end].tolist()
        estimate = None if gradient_BT is None else gradient_BT[row, begin:end].tolist()
        pending = search(units(reasoning, span), end - begin, budget, estimate)
        wanted = next(pending)
        while True:
            try:
                wanted = pending.send(copies.run(response.candidate, wanted))
            except StopIteration as done:
                scores_BT[row, begin:end] = done.value
                break
    return scores_BT


@torch.no_grad()
def entropy(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Entropy of the prediction that each token was drawn from."""
    logits: Tensor = model(input_ids=batch.token_BT, use_cache=False).logits
    _, entropy_T = log_prob_and_entropy(logits.flatten(0, 1), batch.token_BT.flatten())
    return entropy_T.view_as(batch.token_BT).roll(1, 1)


def random_scores(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Noise, the same for the same tokens."""
    seed_B = batch.scorer("fisher", 1).seed_B
    rows, length = batch.token_BT.shape
    place_T = torch.arange(length, device=seed_B.device).repeat(rows)
    return gaussian(position_seeds(seed_B.repeat_interleave(length), place_T), 1).view(rows, length)


# ---- the list


@dataclass(frozen=True)
class Estimator:
    """One way to estimate importance.

    Attributes:
        name: unique.
        score: the function.
        about: one line for readers.
        added: it came with `--also`.
    """

    name: str
    score: Score
    about: str
    added: bool = False


def package_estimators() -> list[Estimator]:
    """Those that the package offers, the reference first, and the controls last."""
    fisher = partial(by_gradient, importance="fisher", draws=1)
    found = [Estimator(REFERENCE, by_copies, "exact OAR-P: every reasoning token replaced by PAD, one at a time")]
    for name, about in (("mean", "by the token nearest to the mean embedding"), ("sampled", "by a drawn token")):
        found.append(Estimator(f"oar_p {name}", partial(by_copies, replacement=name), f"exact, replaced {about}"))
    for span in (2, 4, 8):
        found.append(
            Estimator(f"oar_p span {span}", partial(by_copies, span=span), f"{span} tokens replaced at a time")
        )
    for budget in (0.1, 0.3, 0.5):
        score = partial(by_copies, budget=budget, gradient=fisher)
        found.append(Estimator(f"hybrid {budget}", score, f"exact for the {budget:.0%} with the largest Fisher norm"))
    for draws in (1, 4, 16):
        score = partial(by_gradient, importance="fisher", draws=draws)
        found.append(Estimator(f"fisher {draws}", score, f"Fisher norm, {draws} sign vector{'s' * (draws > 1)}"))
    found.append(Estimator("attention", attention_patching, _first_line(attention_patching)))
    for draws in (1, 8):
        score = partial(by_gradient, importance="oar_g", draws=draws)
        found.append(Estimator(f"oar_g {draws}", score, f"OAR-G as published, mean of {draws} draw{'s' * (draws > 1)}"))
    found.append(Estimator("entropy", entropy, "of the prediction that the token was drawn from"))
    found.append(Estimator("random", random_scores, "noise: what chance gives"))
    return found


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
