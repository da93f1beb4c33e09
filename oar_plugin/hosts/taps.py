"""Hooks on a causal LM that turn an ordinary forward into one that importance can be differentiated through.

Inside `ModelTaps` a forward
* makes the input embeddings the only leaf of the graph (every parameter is frozen, so backward computes no weight
  gradient and touches no `.grad`);
* gives the vocabulary projection *detached* hidden states, so the `[T, V]` logits carry no graph;
* projects the answer's rows a second time, with a graph: `[N, V]`, N = a handful of rows a response; or, for many rows, a
  weighted sum of their logits, chunk by chunk (`oar_plugin.hosts.onward`).

Works on plain modules and on modules wrapped by FSDP1 or FSDP2, with PEFT adapters, activation checkpointing and
autocast. The answer's logits ride on the model's own output, so that FSDP sees a differentiable output and gathers the
root's weights again for the backward, exactly as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from oar_plugin.hosts.onward import weighted_logits

# Models that change the logits after the vocabulary projection; the second projection would miss that.
# (Gemma 2/3, Granite, Cohere.) A value of None, 0 or 1 means that the model does not use it.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class UnsupportedModelError(ValueError):
    """The model is built in a way that importance cannot be read from; the message says which."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The HuggingFace model inside FSDP1's wrapper (FSDP2 changes the class in place and needs nothing)."""
    inner: nn.Module = getattr(module, "_fsdp_wrapped_module", module)
    return inner


def check_model(module: nn.Module) -> None:
    """Refuse models that `ModelTaps` would read wrongly.

    Raises:
        UnsupportedModelError: no input or output embeddings to hook, or logits that are transformed after them.
    """
    model = unwrapped(module)
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        if getattr(model, getter, lambda: None)() is None:
            raise UnsupportedModelError(f"{type(model).__name__}.{getter}() returns no module; OAR needs one to hook.")
    check_logits(getattr(model, "config", None))


def check_logits(config: Any) -> None:
    """Refuse a HuggingFace config whose model changes its logits after the vocabulary projection.

    Raises:
        UnsupportedModelError: names the setting.
    """
    for name in LOGIT_TRANSFORMS:
        value = getattr(config, name, None)
        if value not in (None, 0, 0.0, 1, 1.0):
            raise UnsupportedModelError(
                f"the model changes its logits after the vocabulary projection ({name}={value}); "
                "OAR does not serve that yet. Use another model or algorithm.adv_estimator=grpo."
            )


class Traces:
    """What a pass changes on a host's modules, remembered so that all of it can be taken back.

    Attributes:
        handles: of hooks.
    """

    def __init__(self) -> None:
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self._frozen: list[nn.Parameter] = []
        self._retrained: list[nn.Module] = []

    def freeze(self, module: nn.Module) -> None:
        """Let no parameter ask for a gradient."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)

    def put_into_train_mode(self, module: nn.Module) -> None:
        """This module alone, where hosts look for it to recompute activations: its children, dropout among them, stay."""
        if not module.training:
            module.training = True  # not .train(), which takes the children along
            self._retrained.append(module)

    def undo(self) -> None:
        """Take everything back."""
        for handle in self.handles:
            handle.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        for module in self._retrained:
            module.training = False
        self.handles, self._frozen, self._retrained = [], [], []


class ModelTaps:
    """Context manager that installs the hooks and takes every trace of them away again.

    Usage, for each micro-batch::

        with ModelTaps(model) as taps:
            taps.prepare(row_position_N)
            output = model(input_ids=..., use_cache=False)
            (coefficient_NV * taps.answer_logits).sum().backward()
            gradient = taps.embedding.grad        # [batch, sequence, H]

    Args:
        module: causal LM with `get_input_embeddings` and `get_output_embeddings`; may be wrapped by FSDP.
        checkpoint_activations: recompute the layers that the model is set to checkpoint. Checkpointing acts only in
            train mode, so those layers (not the dropout inside them) are put into it for the time being.

    Raises:
        UnsupportedModelError: see `check_model`.
        RuntimeError: a parameter holds a pending gradient; FSDP1 would drop it.
    """

    def __init__(self, module: nn.Module, checkpoint_activations: bool = False) -> None:
        check_model(module)
        self.module = module
        self.checkpoint_activations = checkpoint_activations
        self.embedding: Tensor | None = None
        self.answer_logits: Tensor | None = None
        self.weighted_sum: Tensor | None = None
        self._rows: Tensor | None = None
        self._noise: Callable[[Tensor], Tensor] | None = None
        self._rows_only = False
        self._coefficients: Callable[[Tensor, int], Tensor] | None = None
        self._hidden: Tensor | None = None
        self._traces = Traces()

    def prepare(
        self,
        row_position_N: Tensor,
        noise: Callable[[Tensor], Tensor] | None = None,
        coefficients: Callable[[Tensor, int], Tensor] | None = None,
        rows_only: bool = False,
    ) -> None:
        """Set what the next forward is to be tapped for.

        Args:
            row_position_N: int64 `[N]`, rows of the flattened `[batch * sequence, H]` hidden states to project with a
                graph; may be empty.
            noise: given the embeddings, returns what to add to them after the leaf, of the same shape; None for nothing.
            coefficients: see `weighted_logits`. With them the rows' logits are not kept: `weighted_sum` is set in place of
                `answer_logits`, and the model's own logits mean nothing.
            rows_only: project nothing but these rows; the model then returns logits `[1, N, V]`.
        """
        self._rows, self._noise, self._rows_only, self._coefficients = row_position_N, noise, rows_only, coefficients
        self.embedding = self.answer_logits = self.weighted_sum = self._hidden = None

    def __enter__(self) -> ModelTaps:
        if any(p.grad is not None for p in self.module.parameters()):
            raise RuntimeError("OAR's importance pass found a pending parameter gradient; run it before backward.")
        self._traces.freeze(self.module)
        if self.checkpoint_activations:
            for module in self.module.modules():
                if getattr(module, "gradient_checkpointing", False):
                    self._traces.put_into_train_mode(module)
        model: Any = unwrapped(self.module)
        head = model.get_output_embeddings()
        self._traces.handles += [
            model.get_input_embeddings().register_forward_hook(self._make_leaf),
            head.register_forward_pre_hook(self._detach_hidden),
            # FSDP's own hooks stand between these two: it must see the rows as an output of the head (where verl shards
            # that by itself) and of the model, to gather the weights again for their backward.
            head.register_forward_hook(self._project_rows, prepend=True),
            head.register_forward_hook(self._take_rows),
            model.register_forward_hook(self._attach_rows, prepend=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._traces.undo()
        self.embedding = self.answer_logits = self.weighted_sum = self._hidden = None
        self._rows = self._noise = self._coefficients = None

    def _make_leaf(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if self._rows is None or self.embedding is not None:
            return None
        self.embedding = output.detach().requires_grad_(True)
        if self._noise is None:
            return self.embedding
        return self.embedding + self._noise(self.embedding.detach()).to(output.dtype)

    def _detach_hidden(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._rows is None:
            return None
        if self._coefficients is not None:
            self._hidden = args[0]
            return (args[0].flatten(0, -2)[:1][None].detach(), *args[1:])  # something has to be projected
        if self._rows_only:
            return (args[0].flatten(0, -2)[self._rows][None], *args[1:])
        self._hidden = args[0]
        return (args[0].detach(), *args[1:])

    def _project_rows(self, module: nn.Module, args: Any, output: Tensor) -> tuple[Tensor, Tensor] | None:
        if self._hidden is None or self._rows is None:
            return None
        rows_NH = self._hidden.flatten(0, -2)[self._rows]
        self._hidden = None
        # .forward, not the call: the hooks on the module are for the full projection.
        if self._coefficients is not None:
            return output, weighted_logits(module.forward, rows_NH, self._coefficients)
        return output, module.forward(rows_NH)

    def _take_rows(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        if self._rows is None:
            return None
        logits: Tensor
        if self._coefficients is not None:
            logits, self.weighted_sum = output
            return logits
        if self._rows_only:
            self.answer_logits = output[0]
            return None
        logits, self.answer_logits = output
        return logits

    def _attach_rows(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.weighted_sum is not None:
            output.hidden_states = (self.weighted_sum,)
        elif self.answer_logits is not None and not self._rows_only:
            output.hidden_states = (self.answer_logits,)
