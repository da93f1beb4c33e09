"""A tap: what one forward of one micro-batch is for. `taps` and `megatron_taps` are the hooks that act on it.

A forward under a `Tap`
* makes the input embeddings the only leaf of the graph, if their gradient is wanted (`receive`);
* gives the vocabulary projection *detached* hidden states, so that the `[T, V]` logits have no graph;
* calls `probe` with the projection and with some rows of hidden states, which have a graph; `probe` returns the scalar.

The leaf delivers its gradient as soon as the gradient exists, and nothing of a micro-batch is kept after its backward.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from oar_plugin.passes.rows import Project


@dataclass
class Tap:
    """One forward."""

    row_position_N: Tensor  # int64 `[N]`, the rows of this rank's flattened hidden states for `probe`; may be empty
    # takes the projection to the vocabulary and those rows `[N, H]`; returns the scalar to differentiate, or None. The
    # projection's weights may be gone when it returns: no graph through them may remain.
    probe: Callable[[Project, Tensor], Tensor | None]
    rows_only: bool = True  # project no other rows; the model's own logits are then meaningless
    # called in the backward with gradient and embedding, both of the embeddings' shape. None: no gradient is wanted.
    receive: Callable[[Tensor, Tensor], None] | None = None
    # takes the embeddings and returns noise of their shape, which is added after the leaf; None: no noise
    noise: Callable[[Tensor], Tensor] | None = None
    # the number of columns of the vocabulary projection on this rank that are tokens; the others are padding of the weight.
    # None: all.
    columns: int | None = None
    scalar: Tensor | None = field(default=None, init=False)  # set by the forward
    embedded: bool = field(default=False, init=False)  # the leaf is in place; a model may embed more than once

    def leaf(self, embedding: Tensor) -> Tensor | None:
        """The tensor that replaces the embeddings; None if they stay."""
        receive, self.embedded = self.receive, True
        if receive is None:
            return None if self.noise is None else embedding + self.noise(embedding).to(embedding.dtype)
        leaf = embedding.detach().requires_grad_(True)

        def deliver(leaf: Tensor) -> None:
            assert leaf.grad is not None
            with torch.no_grad():
                receive(leaf.grad, leaf.detach())
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(deliver)
        # Never the leaf itself: Megatron's recomputation, as verl patches it, frees the storage of a layer's input once its
        # backward is over, before `receive` is called.
        return leaf.clone() if self.noise is None else leaf + self.noise(leaf.detach()).to(leaf.dtype)


class UnsupportedModelError(ValueError):
    """Importance cannot be computed with this model; the message says why."""


class Taps(ExitStack):
    """Context manager in which forwards run under `tap`. Its end undoes all changes of the host's modules.

    Attributes:
        tap: the tap of the next forward, set before each. None: the hooks do nothing.
    """

    tap: Tap | None = None

    def install(self) -> None:
        """Install the hooks, each with a callback that removes it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.install()
        except BaseException:
            self.close()
            raise
        self.callback(setattr, self, "tap", None)
        return self

    def freeze(self, module: nn.Module) -> None:
        """Switch off `requires_grad` of every parameter."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self.callback(parameter.requires_grad_, True)

    def put_into_train_mode(self, module: nn.Module) -> None:
        """Put this module alone into train mode, for hosts that recompute activations in train mode only.

        Its children, dropout among them, keep their mode.
        """
        self.change(module, "training", True)  # not .train(), which changes the children too

    def change(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module; an attribute of its class is hidden by one of the module."""
        if name in vars(module):
            self.callback(setattr, module, name, vars(module)[name])
        else:
            self.callback(delattr, module, name)
        setattr(module, name, value)
