"""What an unmodified verl needs to train on a machine that has no accelerator: demo, tests and CI run on it.

``wanted()`` says whether this process is one of those, ``install()`` puts the pieces in place. Both are called when
verl loads its plugins, in the driver and in every Ray and vLLM process, so they stay cheap: whatever belongs to a heavy
module of verl or vLLM is registered to run after *that* module is imported, by whoever imports it.

The pieces, each with its reason, are listed in :data:`PATCHES`.
"""

import importlib.util
import os
from typing import NamedTuple

from verl_cpu.launch import cpu_environment, cpu_overrides

__all__ = ["PATCHES", "Patch", "cpu_environment", "cpu_overrides", "install", "wanted"]

OTHER_ACCELERATORS = ("torch_npu", "torch_mlu", "torch_musa", "torch_xla", "habana_frameworks")
"""Packages that add an accelerator to a CPU build of torch."""


class Patch(NamedTuple):
    """One thing that is changed, and what it is good for."""

    module: str  # that is changed, once, right after somebody imports it
    apply: str  # `module:function` that makes the change: imported with the module, not before, and given it
    reason: str
    until: str  # the day it can go


PATCHES = (
    Patch(
        module="verl.utils.distributed",
        apply="verl_cpu.device:default_to_one_gloo",
        reason="verl asks for the process group 'cpu:gloo,<device>:<backend>'; torch refuses 'cpu' twice.",
        until="verl leaves out the second half when the device is the CPU.",
    ),
    Patch(
        module="verl.workers.engine.fsdp.transformer_impl",
        apply="verl_cpu.engines:register",
        reason="verl registers its FSDP engines for cuda and npu only.",
        until="verl registers them for cpu.",
    ),
    Patch(
        module="verl.utils.fsdp_utils",
        apply="verl_cpu.engines:leave_fsdp1_where_it_is",
        reason="FSDP1's parameters are moved to '<device>:<index>' before a weight sync; a CPU has no index.",
        until="verl moves them to get_device_id(), as it does for FSDP2.",
    ),
    Patch(
        module="verl.workers.config.engine",
        apply="verl_cpu.megatron:admit_what_there_is",
        reason="verl's configuration admits half precision for Megatron only; its default, Megatron-Bridge, needs Python 3.12.",
        until="it admits fp32, and the CPU stack has Megatron-Bridge.",
    ),
    Patch(
        module="verl.workers.engine.megatron.transformer_impl",
        apply="verl_cpu.megatron:stand_in",
        reason="megatron-core and mbridge ask for CUDA and TransformerEngine; verl moves the storage of DDP's flat parameters, "
        "which are there only with the distributed optimizer, and that one takes CUDA tensors only.",
        until="see each piece in that module.",
    ),
    Patch(
        module="vllm.model_executor.layers.utils",
        apply="verl_cpu.vllm_worker:keep_weights_unpacked",
        reason="vLLM's CPU linear layers pack their weights away at load time; verl must load new ones at every step.",
        until="vLLM can reload a packed CPU layer in place.",
    ),
    Patch(
        module="vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        apply="verl_cpu.vllm_worker:keep_experts_unpacked",
        reason="vLLM's CPU experts pack their weights at load time too; new ones are written over the packed ones as they are.",
        until="vLLM can reload packed CPU experts in place.",
    ),
    Patch(
        module="vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        apply="verl_cpu.vllm_worker:keep_experts_unpacked",
        reason="the experts of vLLM up to 0.24.",
        until="those versions are no longer served.",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.vllm_rollout",
        apply="verl_cpu.vllm_worker:send_through_private_socket",
        reason="the weight socket is named after the Ray job id, which is 01000000 in every fresh local cluster: two "
        "runs on one machine would load each other's weights.",
        until="verl puts something unique to the cluster into the name.",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.utils",
        apply="verl_cpu.vllm_worker:receive_through_private_socket",
        reason="the other end of that socket.",
        until="verl puts something unique to the cluster into the name.",
    ),
)


def wanted() -> bool:
    """Whether verl runs on the CPU here.

    ``VERL_PLATFORM=cpu`` asks for it and any other value refuses it. Without that variable the answer is yes only for a
    CPU build of torch. "No accelerator visible" would not do: Ray hides the GPUs from an actor that asked for none, and
    such an actor of a GPU run must not take the CPU for its platform.
    """
    import torch

    asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if asked not in ("", "cpu") or torch.cuda.is_available() or torch.accelerator.is_available():
        return False
    if any(importlib.util.find_spec(name) for name in OTHER_ACCELERATORS):
        return False
    built_for_gpu = torch.version.cuda is not None or torch.version.hip is not None
    return asked == "cpu" or not built_for_gpu


_installed = False


def install() -> None:
    """Make this process a CPU one. Does nothing the second time."""
    global _installed
    if _installed:
        return
    _installed = True  # first of all: importing verl loads this plugin, which calls this again
    import wrapt

    from verl_cpu import device, distribution

    device.select()
    distribution.alias_vllm()
    for patch in PATCHES:
        wrapt.register_post_import_hook(patch.apply, patch.module)
