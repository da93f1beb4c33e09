"""Hooks on a HuggingFace causal LM that act on a `Tap`.

All parameters are frozen meanwhile, so a backward computes no weight gradient and touches no `.grad`. The model may be plain or
wrapped by FSDP1 or FSDP2, with PEFT adapters, activation checkpointing and autocast. The scalar is attached to the model's own
output, so that FSDP sees a differentiable output and gathers the root's weights again for the backward, as in training.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from oar_plugin.passes.tap import Taps, UnsupportedModelError

# Settings of models that change their logits after the vocabulary projection, which a projection of our own would miss
# (Gemma 2/3, Granite, Cohere, Falcon-H1). A model with None, 0 or 1 does not use the setting.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
)


def unwrapped(module: nn.Module) -> nn.Module:
    """The HuggingFace model inside FSDP1's wrapper (FSDP2 changes the class in place and needs nothing)."""
    inner: nn.Module = getattr(module, "_fsdp_wrapped_module", module)
    return inner


def check_model(module: nn.Module) -> None:
    """Refuse models that `ModelTaps` cannot read correctly.

    Raises:
        UnsupportedModelError: the model has no input or output embeddings to hook, changes its logits after them, or has
            virtual tokens before its own (PEFT's prompt and prefix tuning), which shift the rows of hidden states.
    """
    model = unwrapped(module)
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        if getattr(model, getter, lambda: None)() is None:
            raise UnsupportedModelError(f"{type(model).__name__}.{getter}() returns no module; OAR needs one to hook.")
    adapters = getattr(model, "peft_config", {})
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{type(adapter).__name__} puts tokens in front of the model's own; OAR supports LoRA and other adapters "
                "without virtual tokens."
            )
    check_logits(getattr(model, "config", None))


def check_logits(config: Any) -> None:
    """Refuse a HuggingFace config whose model changes its logits after the vocabulary projection.

    Raises:
        UnsupportedModelError: names the setting.
    """
    text = getattr(config, "get_text_config", lambda: config)()
    for name in LOGIT_TRANSFORMS:
        value = getattr(text, name, None)
        if value not in (None, 0, 0.0, 1, 1.0):
            raise UnsupportedModelError(
                f"the model changes its logits after the vocabulary projection ({name}={value}); "
                "OAR does not support that."
            )


class ModelTaps(Taps):
    """`Taps` of one model. Usage, for each forward::

        with ModelTaps(model) as taps:
            tap = taps.tap = Tap(row_position_N, probe, receive=receive)
            model(input_ids=..., use_cache=False)
            tap.scalar.backward()

    Args:
        module: causal LM with `get_input_embeddings` and `get_output_embeddings`; may be wrapped by FSDP.
        checkpoint_activations: recompute the layers' activations in the backward instead of keeping them.

    Raises:
        UnsupportedModelError: see `check_model`.
        RuntimeError: a parameter holds a pending gradient; FSDP1 would drop it.
    """

    def __init__(self, module: nn.Module, checkpoint_activations: bool = False) -> None:
        super().__init__()
        check_model(module)
        self.module = module
        self.checkpoint_activations = checkpoint_activations
        self._hidden: Tensor | None = None

    def install(self) -> None:
        if any(p.grad is not None for p in self.module.parameters()):
            raise RuntimeError("OAR's importance pass found a pending parameter gradient; run it before backward.")
        if isinstance(self.module, FSDPModule):
            # At its first forward FSDP2 reads the gradients' dtypes from parameters with requires_grad: frozen, none has it.
            self.module._get_fsdp_state()._lazy_init()
        self.freeze(self.module)
        if self.checkpoint_activations:
            for module in self.module.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    self._recompute(module)
                elif getattr(module, "gradient_checkpointing", False):  # a model that checkpoints its layers by itself
                    self.put_into_train_mode(module)
        model: Any = unwrapped(self.module)
        # Hooks inside FSDP1's wrapper and before FSDP2's: a head that is sharded by itself has its weights only there, and a
        # call of the wrapper would gather them, in which ranks with other numbers of rows would not take part.
        head = unwrapped(model.get_output_embeddings())
        hooks: tuple[tuple[Any, Any, dict[str, bool]], ...] = (
            (model.get_input_embeddings().register_forward_hook, self._make_leaf, {}),
            # ZeRO-3 expects a backward of the head before one of the head's input; this pass has no backward of the head.
            (head.register_forward_pre_hook, self._detach_hidden, {"prepend": hasattr(head, "ds_id")}),
            (head.register_forward_hook, self._probe_rows, {"prepend": True}),
            # FSDP must see the scalar as an output of the model, to gather its weights again for the backward.
            (model.register_forward_hook, self._attach_scalar, {"prepend": True}),
        )
        for register, hook, first in hooks:
            self.callback(register(hook, **first).remove)
        self.callback(setattr, self, "_hidden", None)

    def _recompute(self, layer: GradientCheckpointingLayer) -> None:
        """Let a layer checkpoint, which transformers does in train mode only, but compute in eval mode.

        In train mode dropout would act, and so would a host's additions for training (verl's activation offload, which replaces
        the layer's checkpointing).
        """

        def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
            def in_eval_mode(*args: Any) -> Any:
                layer.training = False
                try:
                    return function(*args)
                finally:
                    layer.training = True

            return checkpoint(in_eval_mode, *args, use_reentrant=False)

        self.put_into_train_mode(layer)
        self.change(layer, "gradient_checkpointing", True)
        self.change(layer, "_gradient_checkpointing_func", checkpointed)

    def _make_leaf(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return None if self.tap is None or self.tap.embedded else self.tap.leaf(output)

    def _detach_hidden(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.tap is None:
            return None
        self._hidden = args[0]
        if self.tap.rows_only:
            return (args[0].flatten(0, -2)[:1][None].detach(), *args[1:])  # the model has to project at least one row
        return (args[0].detach(), *args[1:])

    def _probe_rows(self, module: nn.Module, args: Any, output: Tensor) -> None:
        tap, hidden, self._hidden = self.tap, self._hidden, None
        if tap is not None and hidden is not None:
            # .forward, not the call: the hooks on the module are for the full projection.
            tap.scalar = tap.probe(module.forward, hidden.flatten(0, -2)[tap.row_position_N])

    def _attach_scalar(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.tap is not None and self.tap.scalar is not None:
            output.hidden_states = (self.tap.scalar,)
