"""verl's FSDP engines on a CPU. Imported after ``verl.workers.engine.fsdp.transformer_impl``.

It can go when verl registers its FSDP engines for the device ``cpu`` and does not pin memory there.
"""

import copy
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.fsdp import _init_utils


class CpuFSDPMixin:
    """Builds FSDP modules on a CPU. Put it before an FSDP engine in the list of bases.

    verl offloads the parameters of a reference model to pinned memory, and pinning needs an accelerator. On a CPU nothing has
    to be offloaded, so the module is built like an actor's.

    FSDP1 refuses to synchronise parameters that are on the CPU, although Gloo can. Its check is disabled while the module is
    built.
    """

    engine_config: Any

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        config = self.engine_config
        without_offload = copy.copy(config)
        for name in ("forward_only", "offload_policy"):
            object.__setattr__(without_offload, name, False)  # the class is frozen
        self.engine_config = without_offload
        try:
            with mock.patch.object(_init_utils, "_check_module_states_for_sync_module_states"):
                return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config


def register(transformer_impl: ModuleType) -> None:
    """Register the engines of the language model and of the value model for the device ``cpu``."""
    from verl.workers.engine.base import EngineRegistry

    for model_type, engine in (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    ):
        cpu_engine = type(f"Cpu{engine.__name__}", (CpuFSDPMixin, engine), {"__module__": __name__})
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(cpu_engine)


def leave_fsdp1_where_it_is(fsdp_utils: Any) -> None:
    """Make the move of a model to the accelerator do nothing (``verl.utils.fsdp_utils``)."""

    def load_fsdp_model_to_gpu(model: nn.Module) -> None:
        """Nothing to do on a CPU."""

    fsdp_utils.load_fsdp_model_to_gpu = load_fsdp_model_to_gpu
