"""What one forward of one micro-batch is for. Hooks serve it on a HuggingFace model (`taps`) and on Megatron's chunks.

A forward under a `Tap`
* makes the input embeddings the only leaf of the graph, if somebody wants their gradient (`receive`);
* gives the vocabulary projection *detached* hidden states, so that the `[T, V]` logits carry no graph;
* hands the rows of hidden states that matter, with a graph, and the projection itself to `probe`, which returns the scalar.

The gradient is delivered by the leaf itself the moment it exists: nothing is kept for micro-batches whose backward is over.
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

    row_position_N: Tensor  # int64 `[N]`, rows of this rank's flattened hidden states that `probe` gets; may be empty
    # given the projection to the vocabulary and those rows `[N, H]`, returns the scalar to differentiate, or None
    # where there is none. The projection's weights may be gone when it returns: no graph through them can be left.
    probe: Callable[[Project, Tensor], Tensor | None]
    rows_only: bool = True  # project nothing else; the model's own logits then mean nothing
    # called with gradient and embedding, of the embeddings' shape, in the backward. None: no gradient is wanted.
    receive: Callable[[Tensor, Tensor], None] | None = None
    # given the embeddings, what to add to them after the leaf, of the same shape; None: nothing
    noise: Callable[[Tensor], Tensor] | None = None
    # of the vocabulary projection on this rank; what is beyond them is padding of the weight: outcomes that do not
    # exist. None: all.
    columns: int | None = None
    scalar: Tensor | None = field(default=None, init=False)  # set by the forward
    embedded: bool = field(default=False, init=False)  # the leaf is in place; a model may embed more than once

    def leaf(self, embedding: Tensor) -> Tensor | None:
        """What stands in for the embeddings; None: nothing."""
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
    """The model is built in a way that importance cannot be read from; the message says which."""


class Taps(ExitStack):
    """Context manager under which forwards serve `tap`; in the end it takes back all that it changed on a host's modules.

    Attributes:
        tap: what the next forward is for; set anew for each. None: nothing, the hooks let it pass.
    """

    tap: Tap | None = None

    def install(self) -> None:
        """Put the hooks in place, each with a callback that takes it back."""
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
        """Let no parameter ask for a gradient."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self.callback(parameter.requires_grad_, True)

    def put_into_train_mode(self, module: nn.Module) -> None:
        """This module alone, where hosts look for it to recompute activations: its children, dropout among them, stay."""
        self.change(module, "training", True)  # not .train(), which takes the children along

    def change(self, module: nn.Module, name: str, value: Any) -> None:
        """Give a module's attribute another value, or a module an attribute of its own where its class has it."""
        if name in vars(module):
            self.callback(setattr, module, name, vars(module)[name])
        else:
            self.callback(delattr, module, name)
        setattr(module, name, value)
