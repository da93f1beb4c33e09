"""Stand-ins that verl 0.8 needs: it has no platforms, no plugins, and no packing without flash-attention.

It can go when verl 0.8 is no longer supported. Each function does nothing in a newer verl.
"""

import importlib.util
import os
from functools import wraps
from pathlib import Path
from typing import Any

EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
"""Environment variable with the modules that `import verl` imports, in every version of verl."""


def external_modules() -> dict[str, str]:
    """Return that variable, extended by this package, for a verl that loads no plugins by their entry points; else nothing."""
    verl, named = importlib.util.find_spec("verl"), os.environ.get(EXTERNAL_MODULES, "")
    if verl is None or verl.origin is None or '"verl.plugins"' in Path(verl.origin).read_text(encoding="utf-8"):
        return {}
    return {EXTERNAL_MODULES: ",".join(dict.fromkeys(filter(None, ["verl_cpu.plugin", *named.split(",")])))}


def select(platform: Any) -> None:
    """Make the CPU the device of this process (``verl.utils.device``)."""
    from verl.utils import device

    device.get_torch_device = lambda: platform.device_module
    device.get_nccl_backend = platform.communication_backend_name
    device.get_resource_name = platform.ray_resource_name


def count_as_gpus(base: Any) -> None:
    """Let Ray count each worker as a GPU (``verl.single_controller.ray.base``)."""
    if hasattr(base, "get_platform"):
        return
    for owner, name in ((base.RayResourcePool, "get_placement_groups"), (base.RayClassWithInitArgs, "__call__")):
        setattr(owner, name, _with_gpus(getattr(owner, name)))


def _with_gpus(original: Any) -> Any:
    @wraps(original)
    def on_gpus(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_name") == "cpu":
            kwargs["device_name"] = "cuda"  # verl's name for what Ray calls GPU
        return original(*args, **kwargs)

    return on_gpus


def pack_in_torch(attention_utils: Any) -> None:
    """Pack batches with verl's own functions for NPUs, which are plain torch (``verl.utils.attention_utils``)."""
    if hasattr(attention_utils, "_fallback_unpad_input"):
        return

    def functions() -> tuple[Any, ...]:
        from verl.utils import npu_flash_attn_utils as plain

        return plain.index_first_axis, plain.pad_input, plain.rearrange, plain.unpad_input

    attention_utils._get_attention_functions = functions


def name_device(utils: Any) -> None:
    """Name the CPU: verl asks vLLM for a UUID that it does not use (``verl.workers.rollout.vllm_rollout.utils``)."""
    if hasattr(utils, "get_device_uuid"):
        utils.get_device_uuid = lambda device_id: "CPU"
