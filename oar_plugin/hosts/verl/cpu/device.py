"""verl's platform for a machine without an accelerator.

verl has an extension point for this, ``PlatformRegistry`` and ``set_platform``; this module fills it in. The day it can
go: verl ships a CPU platform.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, platform_manager, set_platform


def _peak_memory(*_: object) -> int:
    """Peak resident memory of this process in bytes: what stands in for peak device memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory(*_: object) -> tuple[int, int]:
    """Free and total memory of the machine in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _nothing(*_: object, **__: object) -> None:
    """Stands in for device calls without a meaning on a CPU."""


def _zero(*_: object) -> int:
    return 0


class CpuDeviceModule(ModuleType):
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls and ``torch.cpu`` lacks.

    A module of its own: adding names to ``torch.cpu`` would be seen by every library of the process.
    """

    empty_cache = staticmethod(_nothing)
    ipc_collect = staticmethod(_nothing)
    set_device = staticmethod(_nothing)
    set_per_process_memory_fraction = staticmethod(_nothing)
    synchronize = staticmethod(_nothing)
    reset_peak_memory_stats = staticmethod(_nothing)
    memory_allocated = staticmethod(_zero)
    memory_reserved = staticmethod(_zero)
    max_memory_allocated = staticmethod(_peak_memory)
    max_memory_reserved = staticmethod(_peak_memory)
    mem_get_info = staticmethod(_memory)

    @staticmethod
    def is_available() -> bool:
        """The CPU is always there."""
        return True

    @staticmethod
    def device_count() -> int:
        """One: a process has one CPU device however many cores."""
        return 1

    @staticmethod
    def get_device_name(*_: object) -> str:
        """The name by which verl looks up peak FLOPS; it knows none for a CPU, so MFU reads as zero."""
        return "CPU"

    @staticmethod
    def get_rng_state(*_: object) -> torch.Tensor:
        """The state of torch's default generator, which is the CPU's."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_: object) -> None:
        """Sets the state of torch's default generator, which is the CPU's."""
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class PlatformCPU(PlatformBase):
    """The CPU as verl sees it: a device named ``cpu`` that Ray counts as ``GPU``."""

    _device_module = CpuDeviceModule("oar_cpu_device")

    @property
    def device_name(self) -> str:
        """The torch device type."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """No vendor matters: engines are found by device name."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """What ``torch.cuda`` is for CUDA."""
        return self._device_module

    def is_available(self) -> bool:
        """Always there."""
        return True

    def current_device(self) -> Any:
        """``"cpu"``: verl hands this to ``tensor.to``, which takes no index for a CPU."""
        return "cpu"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to choose from."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's default generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds torch's default generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU allocator has no settings."""

    def empty_cache(self) -> None:
        """The CPU allocator has no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Not applicable, in the form that verl expects."""
        return None, None

    def communication_backend_name(self) -> str:
        """Gloo is the backend for tensors on a CPU."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A name that Ray's GPU accounting sets; nothing reads it here."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """``GPU``: verl places its workers by this resource and checks that the cluster has it.

        ``cpu_overrides()`` tells Ray how many of these pretended GPUs there are.
        """
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Nothing that Ray must keep its hands off."""
        return []

    def is_ipc_supported(self) -> bool:
        """No CUDA IPC: weights travel to vLLM through shared memory."""
        return False

    def cudart(self) -> Any:
        """No CUDA runtime."""
        return None


def select() -> None:
    """Make the CPU the platform of this process.

    Plugins load before anything in verl asks for its platform, so no environment variable is needed.
    """
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    if not isinstance(platform_manager._current_platform, PlatformCPU):
        set_platform(PlatformCPU())


def default_to_one_gloo(distributed: Any) -> None:
    """Ask for the process group ``cpu:gloo`` unless the caller names one (``verl.utils.distributed``)."""
    original = distributed.initialize_global_process_group_ray

    @wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray
