"""Estimators of importance under one signature, and what each of them computes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import patch

from torch import Tensor, nn

from benchmarks.fidelity.responses import Batch
from oar_plugin.config import OarConfig
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request

Score: TypeAlias = Callable[[nn.Module, Batch], Tensor]
"""Scores `[B, T]` of a batch, of which those of reasoning tokens are read, and only their order and size within a
response. The model is in eval mode, and what was changed on it must be taken back."""

REFERENCE = "oar_p"
"""Exact OAR-P, what the others estimate."""
DRAWS = (1, 4)
"""Of signs or noise."""


def by_importance(model: nn.Module, batch: Batch, importance: str, **asked: Any) -> Tensor:
    """An importance of the package, as an engine computes it; `asked` are settings, and `budget` and `span` of copies."""
    copies = {name: asked.pop(name) for name in ("budget", "span") if name in asked}
    replacement = asked.pop("replacement_token", batch.pad)
    config = OarConfig(importance=importance, probe=batch.probe, perturbation=copies, **asked)
    request = Request(config, batch.probe, batch.seed, temperature=batch.temperature, replacement_token=replacement)
    return batch_importance(model, request, batch.token_BT, batch.segments_BT, batch.mask_BT, batch.max_tokens)


def by_position(model: nn.Module, batch: Batch) -> Tensor:
    """The later, the more important: what looks at no answer and costs nothing."""
    return batch.mask_BT.cumsum(-1)


def behind_layer(model: nn.Module, batch: Batch, number: int, importance: str) -> Tensor:
    """An importance at the hidden states behind a layer (from 1), in place of the input embeddings."""
    layer = model.get_submodule(f"model.layers.{number - 1}")
    with patch.object(model, "get_input_embeddings", lambda: layer):  # where the graph's only leaf is
        return by_importance(model, batch, importance)


def package_estimators() -> dict[str, Score]:
    """The package's importances, each at its own cost first and then at others, by name."""
    found: dict[str, Score] = {}
    for name, importance in IMPORTANCES.items():
        if importance.learns:  # it does not estimate how far a token moves the answer
            continue
        copies = importance.copies
        variants: dict[str, dict[str, Any]] = {"": {}}
        if copies is not None and copies.by_gradient:
            variants = {f" {budget}": {"budget": budget} for budget in (copies.budget, 0.1, 0.5)}
        elif copies is not None:
            variants = {"": {"budget": copies.budget}}
            if name == REFERENCE:
                variants |= {" sampled": {"replacement_token": None}}
        elif importance.backwards:
            variants = {f" {draws}": {"num_draws": draws} for draws in DRAWS}
        found |= {name + suffix: partial(by_importance, importance=name, **kw) for suffix, kw in variants.items()}
    return found | {"position": by_position}


def added_estimators(importances: Sequence[str], behind: Sequence[str] = ()) -> dict[str, Score]:
    """Importances from outside the package, by class name, and those of `behind`, `<importance>:<layer>`.

    Raises:
        ValueError: there is no such importance, it learns, no gradient of it is behind a layer, or two have
            one name.
    """
    layers = []
    for one in behind:
        name, _, layer = one.rpartition(":")
        if not (layer.isdecimal() and importance_of(name).backwards):
            raise ValueError(
                f"--behind {one}: write <importance>:<layer>, with an importance that has a gradient, as fisher:8"
            )
        layers.append((name, int(layer)))
    for path in (*importances, *(name for name, _ in layers)):
        if importance_of(path).learns:
            raise ValueError(f"{path}: it learns over the steps of a training, which this study lacks")
    added: dict[str, Score] = {path.rpartition(":")[2]: partial(by_importance, importance=path) for path in importances}
    for name, number in layers:
        added[f"{name.rpartition(':')[2]} layer {number}"] = partial(behind_layer, number=number, importance=name)
    if len(added) < len({*importances, *layers}):
        raise ValueError(f"--also, --behind: two importances have one name, of {', '.join(added)}; rename a class")
    return added


@contextmanager
def counted_work(model: nn.Module) -> Iterator[Counter[str]]:
    """Count tokens `forward` and `backward`: a pass over B x T counts `B * T`, a backward that stops half-way down half."""
    layers: Any = model.get_submodule("model.layers")
    work: Counter[str] = Counter()

    def count(layer: nn.Module, args: Any, hidden: Tensor) -> None:
        tokens: Any = hidden.numel() / hidden.shape[-1] / len(layers)
        work["forward"] += tokens
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: work.update(backward=tokens))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(count).remove)
        yield work
