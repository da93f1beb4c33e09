"""Memory: the peak of live tensor bytes, counted storage by storage, the same on every machine; and what is left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate while it is active, until each is freed.

    Sees forward, backward and recomputation alike. Storages that existed before count nothing, nor does scratch memory that a
    kernel allocates and frees within one operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in given | self._known:
                self._known.add(key)
                size = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self._release, key, size).atexit = False
                self.live += size
                self.peak = max(self.peak, self.live)
        return result

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `work` held at once on top of what was there before, by CUDA's allocator or `LiveBytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as counter:
        work()
    return counter.peak


def free_bytes(device: torch.device) -> int:
    """What can still be had without pushing anything out, now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
