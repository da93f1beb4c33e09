"""Memory: the peak of live tensor bytes, counted storage by storage, the same on every machine; and what is left."""

from __future__ import annotations

import os
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

    Sees forward, backward and recomputation alike (on a CPU, backward runs in the calling thread). Storages that
    existed before count nothing, nor does scratch memory that a kernel allocates and frees within one operator.

    Attributes:
        live: bytes alive now.
        peak: largest value of `live` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _key(x) not in given and _key(x) not in self._known:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        weakref.finalize(storage, self._release, key, size).atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `work` held at once on top of what was there before, by CUDA's allocator or `LiveBytes`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as counter:
        work()
    return counter.peak


def free_bytes(device: torch.device) -> int:
    """What can still be had without pushing anything out, now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
