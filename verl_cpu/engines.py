"""verl's FSDP engines on a CPU.

Imported only after ``verl.workers.engine.fsdp.transformer_impl``. The day it can go: verl registers its FSDP engines
for the device ``cpu`` and does not pin memory there.
"""

import copy
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.fsdp import _init_utils


class CpuFSDPMixin:
    """What FSDP needs on a CPU. Put it before an FSDP engine in the list of bases.

    A reference model is built with its parameters "offloaded to the CPU" in pinned memory, and pinning needs an
    accelerator. On a CPU there is nothing to offload: the module is built as an actor's would be.

    FSDP1 refuses to synchronise a module whose parameters are on the CPU, assuming that they were forgotten there; Gloo
    can. The check is left out while the module is built.
    """

    engine_config: Any

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        config = self.engine_config
        without_offload = copy.copy(config)
        for name in ("forward_only", "offload_policy"):
            object.__setattr__(without_offload, name, False)  # the config is frozen; this copy is ours
        self.engine_config = without_offload
        try:
            with mock.patch.object(_init_utils, "_check_module_states_for_sync_module_states"):
                return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config


def register(transformer_impl: ModuleType) -> None:
    """Register the language-model engine, and the value model's beside it, for the device ``cpu``."""
    from verl.workers.engine.base import EngineRegistry

    for model_type, engine in (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    ):
        cpu_engine = type(f"Cpu{engine.__name__}", (CpuFSDPMixin, engine), {"__module__": __name__})
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(cpu_engine)


def leave_fsdp1_where_it_is(fsdp_utils: Any) -> None:
    """Skip the move of the model to the accelerator: it is where it belongs (``verl.utils.fsdp_utils``)."""

    def load_fsdp_model_to_gpu(model: nn.Module) -> None:
        """Nothing to do on a CPU."""

    fsdp_utils.load_fsdp_model_to_gpu = load_fsdp_model_to_gpu
