"""Estimators of importance under one signature, and what each of them computes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

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
    """An importance of the package, as an engine computes it; `asked` are settings."""
    replacement = asked.pop("replacement_token", batch.pad)
    config = OarConfig(importance=importance, probe=batch.probe, amortize={"share": None}, **asked)
    request = Request(config, batch.probe, batch.seed, temperature=batch.temperature, replacement_token=replacement)
    return batch_importance(model, request, batch.token_BT, batch.segments_BT, batch.mask_BT, batch.max_tokens)


def by_position(model: nn.Module, batch: Batch) -> Tensor:
    """The later, the more important: what looks at no answer and costs nothing."""
    return batch.mask_BT.cumsum(-1)


def package_estimators() -> dict[str, Score]:
    """The package's importances, each at its own cost first and then at others, by name."""
    found: dict[str, Score] = {}
    for name, importance in IMPORTANCES.items():
        variants: dict[str, dict[str, Any]] = {"": {}}
        if name == REFERENCE:
            variants |= {" sampled": {"replacement_token": None}}
        elif importance.backwards:
            variants = {f" {draws}": {"num_draws": draws} for draws in DRAWS}
        found |= {name + suffix: partial(by_importance, importance=name, **kw) for suffix, kw in variants.items()}
    return found | {"position": by_position}


def added_estimators(importances: Sequence[str]) -> dict[str, Score]:
    """Importances from outside the package, by class name.

    Raises:
        ValueError: there is no such importance, or two have one name.
    """
    for path in importances:
        importance_of(path)
    added: dict[str, Score] = {path.rpartition(":")[2]: partial(by_importance, importance=path) for path in importances}
    if len(added) < len({*importances}):
        raise ValueError(f"--also: two importances have one name, of {', '.join(added)}; rename a class")
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
