"""Stand-ins that let an unmodified verl train on a machine without an accelerator. Demo, tests and CI use them.

``wanted()`` says whether this process runs on the CPU; ``install()`` puts the stand-ins in place. ``plugin.py`` calls both when
verl loads its plugins: in the driver and in every Ray and vLLM process. Both stay cheap: a change to a heavy module of verl or
vLLM is registered, and made after somebody else has imported that module.

:data:`PATCHES` lists the changes, each with its reason.
"""

import importlib.util
import os
from typing import NamedTuple

from verl_cpu.launch import cpu_environment, cpu_overrides

__all__ = ["PATCHES", "Patch", "cpu_environment", "cpu_overrides", "install", "wanted"]

OTHER_ACCELERATORS = ("torch_npu", "torch_mlu", "torch_musa", "torch_xla", "habana_frameworks")
"""Packages that add an accelerator to a CPU build of torch."""


class Patch(NamedTuple):
    """One change to a module, and its reason."""

    module: str  # the module that is changed, once, right after its first import
    apply: str  # `module:function`, called with the imported module; imported no earlier than that
    reason: str
    until: str  # when the change can go


PATCHES = (
    Patch(
        module="verl.utils.distributed",
        apply="verl_cpu.device:default_to_one_gloo",
        reason="verl asks for the process group 'cpu:gloo,<device>:<backend>'; torch refuses 'cpu' twice.",
        until="verl leaves out the second half when the device is the CPU.",
    ),
    Patch(
        module="verl.single_controller.ray.base",
        apply="verl_cpu.before_platforms:count_as_gpus",
        reason="verl 0.8 asks Ray for a resource named cpu; Ray counts each worker as a GPU.",
        until="verl 0.8 is no longer supported.",
    ),
    Patch(
        module="verl.single_controller.ray.base",
        apply="verl_cpu.device:meet_where_nobody_listens",
        reason="verl lets go of a free port that its workers listen on seconds later; a new worker of a local Ray may get it.",
        until="verl's own range of such ports is a setting of its trainer.",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.utils",
        apply="verl_cpu.before_platforms:name_device",
        reason="verl 0.8 asks vLLM for the UUID of its device.",
        until="verl 0.8 is no longer supported.",
    ),
    Patch(
        module="verl.utils.attention_utils",
        apply="verl_cpu.before_platforms:pack_in_torch",
        reason="verl 0.8 packs batches with functions of flash-attention only.",
        until="verl 0.8 is no longer supported.",
    ),
    Patch(
        module="verl.trainer.constants_ppo",
        apply="verl_cpu.forks:start_workers_as_forks",
        reason="Each of verl's ten workers imports for 20 s of a core; forks of one process import once.",
        until="imports take seconds.",
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
        reason="verl's configuration allows only half precision for Megatron; its default, Megatron-Bridge, needs Python 3.12.",
        until="it allows fp32, and the CPU stack has Megatron-Bridge.",
    ),
    Patch(
        module="verl.workers.engine.megatron.transformer_impl",
        apply="verl_cpu.megatron:stand_in",
        reason="megatron-core and mbridge need CUDA and TransformerEngine; verl moves the storage of DDP's flat parameters, "
        "which only the distributed optimizer has, and that optimizer takes CUDA tensors only.",
        until="verl_cpu/megatron.py says it for each stand-in.",
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
        reason="vLLM's CPU experts pack their weights at load time too; new weights overwrite the packed ones, unpacked.",
        until="vLLM can reload packed CPU experts in place.",
    ),
    Patch(
        module="vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        apply="verl_cpu.vllm_worker:keep_experts_unpacked",
        reason="the same in vLLM up to 0.24.",
        until="those versions are no longer supported.",
    ),
    Patch(
        module="vllm.model_executor.layers.fused_moe.layer",
        apply="verl_cpu.vllm_worker:name_experts",
        reason="verl 0.8 and its branch neo import a class from there that vLLM 0.24 has removed.",
        until="verl 0.8 is no longer supported, and neo has verl 0.9's code for it.",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.vllm_rollout",
        apply="verl_cpu.vllm_worker:send_through_private_socket",
        reason="the weight socket is named after the Ray job id, which is 01000000 in every fresh local cluster: two "
        "runs on one machine would load each other's weights.",
        until="verl puts a name of the cluster into the name of the socket.",
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.utils",
        apply="verl_cpu.vllm_worker:receive_through_private_socket",
        reason="the other end of that socket.",
        until="verl puts a name of the cluster into the name of the socket.",
    ),
)


def wanted() -> bool:
    """Return whether verl runs on the CPU in this process.

    Never where torch sees an accelerator or a package for one is installed. Elsewhere ``VERL_PLATFORM=cpu`` says yes and any
    other value says no; without the variable the answer is yes for a CPU build of torch only. A GPU build that sees no GPU is
    not enough: Ray hides the GPUs from an actor that asked for none, and such an actor of a GPU run must not take the CPU for
    its platform.
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
    """Make the CPU the platform of this process. The second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True  # before all else: importing verl loads this plugin, which calls this function again
    import wrapt

    from verl_cpu import device, distribution

    device.select()
    distribution.alias_vllm()
    for patch in PATCHES:
        wrapt.register_post_import_hook(patch.apply, patch.module)
