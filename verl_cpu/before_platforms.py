"""Stand-ins that only verl 0.8 needs: it has no platforms, no plugins, and no packing without flash-attention.

It can go when verl 0.8 is no longer supported. Each function does nothing in a newer verl.
"""

import importlib.util
from functools import wraps
from typing import Any

PLUGINS = "VERL_USE_EXTERNAL_MODULES"
"""Names the modules that `import verl` imports, in every version. verl 0.8 loads no plugins by their entry points."""


def external_modules() -> dict[str, str]:
    """Return the variable with which verl 0.8 loads this package beside what the variable names; nothing in a newer verl."""
    import os

    if importlib.util.find_spec("verl") is None or importlib.util.find_spec("verl.plugin"):
        return {}
    return {PLUGINS: ",".join([*filter(None, [os.environ.get(PLUGINS)]), "verl_cpu.plugin"])}


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
