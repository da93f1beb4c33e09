"""Copies to the model's device that the CPU does not wait for.

Which rows and tokens a pass needs is known on the CPU before a micro-batch starts. Code on the CPU that asks the device for
such a number (`nonzero`, a bool mask as index, `item`) waits until the device has done everything before it.
"""

import torch
from torch import Tensor

CPU = torch.device("cpu")


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copies int64 tensors on the CPU to the device, all of them in one copy."""
    flat = torch.cat([one.flatten() for one in tensors])
    if device.type != "cpu" and torch.accelerator.is_available():
        flat = flat.pin_memory()  # the CPU waits for a copy from other memory
    parts = flat.to(device, non_blocking=True).split([one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]
