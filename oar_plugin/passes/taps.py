"""A tap says what one forward of one micro-batch must compute. Hooks on the model act on it (`ModelTaps`, `MegatronTaps`):

* they make the input embeddings the only leaf of the graph, if their gradient is wanted;
* they give *detached* hidden states to the vocabulary projection, so that the `[T, V]` logits have no graph;
* they call `probe`, which returns the scalar, with the projection and some rows of hidden states, which have a graph.

`receive` gets the gradient as soon as it exists, and nothing of a micro-batch is kept after its backward.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import Self

from oar_plugin.credit.importance import Forward
from oar_plugin.passes.rows import Project


def _soft_cap(logits_NV: Tensor, cap: float) -> Tensor:
    logits_NV.div_(cap).tanh_()
    # For a backward, autograd keeps the result of `tanh_`.
    return logits_NV * cap if logits_NV.requires_grad else logits_NV.mul_(cap)


LOGIT_CHANGES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "logits_scaling": Tensor.div_,
    "logit_scale": Tensor.mul_,
    "lm_head_multiplier": Tensor.mul_,
    "output_multiplier": Tensor.mul_,
    "final_logit_softcapping": _soft_cap,
    "logits_soft_cap": _soft_cap,
    "output_logit_soft_cap": _soft_cap,
}
"""Config keys of models that change each logit after the vocabulary projection, with the change (in place, as far as autograd
allows it), in the order of changes. A model that does something else is refused by its trial (`trial.py`)."""


@dataclass
class Tap:
    row_position_N: Tensor  # int64 `[N]`, the rows of this rank's flattened hidden states for `probe`, on their device
    # Takes the projection to the vocabulary and these rows `[N, H]`; returns the scalar to differentiate, or None. FSDP may
    # free the projection's weights afterwards: the scalar's graph must not contain them.
    probe: Callable[[Project, Tensor], Tensor | None]
    rows_only: bool = True  # project no other rows; the model's own logits are then meaningless
    # called in the backward with gradient and embeddings, of the same shape; None: no gradient is wanted
    receive: Callable[[Tensor, Tensor], None] | None = None
    noise: Callable[[Tensor], Tensor] | None = None  # function of the embeddings; its result is added after the leaf
    columns: int | None = None  # number of columns of this rank's projection that are tokens, not padding; None: all
    scalar: Tensor | None = field(default=None, init=False)  # set by the forward
    embedded: bool = field(default=False, init=False)  # true after the first embedding; later ones are not replaced

    def see(self, output: Any) -> None:
        """Called with the model's output."""

    def leaf(self, embedding: Tensor) -> Tensor | None:
        """Returns the tensor that replaces the embeddings; None: they are not replaced."""
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
        # Do not return the leaf: verl's patch of Megatron's recomputation frees a layer's input before `receive` runs.
        return leaf.clone() if self.noise is None else leaf + self.noise(leaf.detach()).to(leaf.dtype)


def together(tap: Tap, more: Tap) -> Tap:
    """`tap`, whose forward also reads the rows of `more`, which has no scalar."""
    count = len(tap.row_position_N)

    def probe(project: Project, hidden_NH: Tensor) -> Tensor | None:
        more.probe(project, hidden_NH[count:])
        return tap.probe(project, hidden_NH[:count])

    return replace(tap, row_position_N=torch.cat([tap.row_position_N, more.row_position_N]), probe=probe)


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copies int64 tensors on the CPU to the device, all of them in one copy that the CPU does not wait for."""
    flat = torch.cat([one.flatten() for one in tensors])
    if device.type != "cpu" and torch.accelerator.is_available():
        flat = flat.pin_memory()  # the CPU waits for a copy from other memory
    parts = flat.to(device, non_blocking=True).split([one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]


class UnsupportedModelError(ValueError):
    """Importance cannot be computed with this model. The message says why."""


class Taps(ExitStack):
    """Context manager with hooks on a model. Its end undoes all changes of the model."""

    tap: Tap | None = None  # the tap of the next forward; None: the hooks do nothing

    def install(self) -> None:
        """Installs the hooks, each with a callback that removes it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.install()
        except BaseException:
            self.close()
            raise
        self.callback(setattr, self, "tap", None)
        return self

    @contextmanager
    def running(self, forward: Forward) -> Iterator[None]:
        """The body sets `self.tap` and runs the model once. At its end comes the backward, if there is one. It needs the memory
        of the logits, which the body must not keep.
        """
        assert self.tap is None
        try:
            with torch.set_grad_enabled(forward.backward is not None):
                yield
            assert self.tap is not None, "the model ran without a tap"
            if self.tap.scalar is not None:
                self.tap.scalar.backward()
        finally:
            self.tap = None  # a tap holds the graph, which must be freed before the next forward

    def freeze(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self.callback(parameter.requires_grad_, True)

    def change(self, thing: Any, name: str, value: Any) -> None:
        """Sets an attribute of the thing, never of its class, until the exit: `training` without a module's children."""
        if name in vars(thing):
            self.callback(setattr, thing, name, vars(thing)[name])
        else:
            self.callback(delattr, thing, name)
        setattr(thing, name, value)


def unwrapped(module: nn.Module) -> nn.Module:
    """The HuggingFace model inside FSDP1's wrapper. FSDP2 has no wrapper."""
    return getattr(module, "_fsdp_wrapped_module", module)


def check_model(module: nn.Module) -> None:
    """UnsupportedModelError: it has no embeddings to hook, returns tuples, or has virtual tokens, which shift its rows."""
    model = unwrapped(module)
    if getattr(getattr(model, "config", None), "return_dict", True) is False:
        raise UnsupportedModelError("return_dict=False in the model's config: OAR reads outputs by name; allowed: True")
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        if getattr(model, getter, lambda: None)() is None:
            raise UnsupportedModelError(f"{type(model).__name__}.{getter}() returns no module; OAR needs one to hook.")
    adapters = getattr(model, "peft_config", {})
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if getattr(adapter, "is_prompt_learning", False):
            fault = f"{type(adapter).__name__} puts tokens in front of the model's own"
            raise UnsupportedModelError(f"{fault}; OAR supports LoRA and other adapters without virtual tokens.")


def logit_changes(config: Any) -> dict[str, float]:
    """The keys of `LOGIT_CHANGES` that change the logits of a model with this config, and their values."""
    text = getattr(config, "get_text_config", lambda: config)()
    values = {name: getattr(text, name, None) for name in LOGIT_CHANGES}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    changes = {name: value for name, value in numbers.items() if value != 1 or LOGIT_CHANGES[name] is _soft_cap}
    if "logits_scaling" in changes and text.model_type == "hyperclovax":  # multiplies, others divide
        changes["logits_scaling"] = 1 / changes["logits_scaling"]
    return changes


class Projection:
    """The way from a HuggingFace model's last hidden states to its logits. It runs no hooks of the head."""

    def __init__(self, model: Any) -> None:
        self._head: Any = unwrapped(model.get_output_embeddings())
        self._changes = logit_changes(getattr(model, "config", None))

    @property
    def linear(self) -> bool:
        """Whether the gradient at the hidden states does not depend on them. A user's own head may be anything."""
        capped = any(LOGIT_CHANGES[name] is _soft_cap for name in self._changes)
        return isinstance(self._head, nn.Linear) and not capped

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        logits_NV: Tensor = self._head.forward(hidden_NH)
        for name, value in self._changes.items():
            logits_NV = LOGIT_CHANGES[name](logits_NV, value)
        return logits_NV


class ModelTaps(Taps):
    """`Taps` of a HuggingFace causal LM, with frozen parameters inside `with`. `passes/gradient.py` begins with an example.

    With `reads_only` no backward is run, and nothing but hooks is added: outputs are those without them, bit for bit. With
    `checkpoint_activations`, a backward recomputes the layers' activations. `fused`: the model's forward takes the projection's
    weight and does not call the projection (verl's fused kernels).
    UnsupportedModelError: see `check_model`. RuntimeError: a parameter has a `.grad`, which FSDP1 would drop.
    """

    def __init__(
        self, module: nn.Module, checkpoint_activations: bool = False, fused: bool = False, reads_only: bool = False
    ) -> None:
        super().__init__()
        check_model(module)
        self.module, self.checkpoint_activations, self.fused = module, checkpoint_activations, fused
        self.reads_only = reads_only
        self._hidden: Tensor | None = None

    def install(self) -> None:
        if not self.reads_only:
            self._prepare()
        model: Any = unwrapped(self.module)
        # Hooks run inside FSDP1's wrapper and before FSDP2's hooks: there, a separately sharded head is gathered.
        # A call of the wrapper would gather weights once per chunk of rows, and ranks have different numbers of chunks.
        head = unwrapped(model.get_output_embeddings())
        self.callback(model.get_input_embeddings().register_forward_hook(self._make_leaf).remove)
        if self.fused:
            self.callback(model.get_decoder().register_forward_hook(self._detach_last_hidden).remove)
        else:
            # ZeRO-3 expects the head's backward before the backward of its input. This pass runs no head backward.
            first = hasattr(head, "ds_id")
            self.callback(head.register_forward_pre_hook(self._detach_hidden, prepend=first).remove)
            self.callback(head.register_forward_hook(self._probe_rows, prepend=True).remove)
        # FSDP gathers weights again for the backward, as in training, if an output of the model is differentiable.
        self.callback(model.register_forward_hook(self._attach_scalar, prepend=True).remove)
        self.callback(setattr, self, "_hidden", None)

    def _prepare(self) -> None:
        if any(p.grad is not None for p in self.module.parameters()):
            raise RuntimeError("OAR's importance pass found a pending parameter gradient; run it before backward.")
        if isinstance(self.module, FSDPModule):
            # FSDP2's lazy init takes gradient dtypes from parameters with requires_grad, so run it before the freeze.
            self.module._get_fsdp_state()._lazy_init()
        self.freeze(self.module)
        if self.checkpoint_activations:
            for module in self.module.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    self._recompute(module)
                elif getattr(module, "gradient_checkpointing", False):  # the model itself checkpoints its layers
                    self.change(module, "training", True)

    def _recompute(self, layer: GradientCheckpointingLayer) -> None:
        """Makes a layer compute in eval mode, but checkpoint its activations, as transformers does only in train mode.

        Train mode would turn on dropout and verl's activation offload, which replaces the layer's checkpointing.
        """

        def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
            def in_eval_mode(*args: Any) -> Any:
                layer.training = False
                try:
                    return function(*args)
                finally:
                    layer.training = True

            return checkpoint(in_eval_mode, *args, use_reentrant=False)

        self.change(layer, "training", True)
        self.change(layer, "gradient_checkpointing", True)
        self.change(layer, "_gradient_checkpointing_func", checkpointed)

    def _make_leaf(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return None if self.tap is None or self.tap.embedded else self.tap.leaf(output)

    def _detach_hidden(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.tap is None:
            return None
        self._hidden = args[0]
        if self.tap.rows_only:
            return (args[0].flatten(0, -2)[:1][None].detach(), *args[1:])  # the model must project at least one row
        return (args[0].detach(), *args[1:])

    def _probe_rows(self, module: nn.Module, args: Any, output: Tensor) -> None:
        tap, hidden, self._hidden = self.tap, self._hidden, None
        if tap is not None and hidden is not None:
            tap.scalar = tap.probe(Projection(unwrapped(self.module)), hidden.flatten(0, -2)[tap.row_position_N])

    def _detach_last_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        """`_detach_hidden` and `_probe_rows` for a fused forward. The weights of the projection are gathered for both."""
        if self.tap is not None:
            self._hidden, output.last_hidden_state = output.last_hidden_state, output.last_hidden_state.detach()
            self._probe_rows(module, args, self._hidden)

    def _attach_scalar(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.tap is not None:
            self.tap.see(output)
            if self.tap.scalar is not None:
                output.hidden_states = (self.tap.scalar,)
