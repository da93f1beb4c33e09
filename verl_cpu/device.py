"""A platform of verl for machines without an accelerator, registered at verl's extension point.

It can go when verl has one.
"""

import os
import resource
import secrets
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from verl_cpu import before_platforms

try:
    from verl.plugin.platform import PlatformBase, PlatformRegistry, platform_manager, set_platform
except ModuleNotFoundError:  # verl 0.8
    PlatformBase, PlatformRegistry = object, None


BELOW_EPHEMERAL = (20000, 32768)
"""Ports that Linux gives to nobody who asks for any (``ip_local_port_range``), above those of ``ray start``."""


def _peak_memory(*_: object) -> int:
    """Return the peak resident memory of this process in bytes, in place of the device's."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory(*_: object) -> tuple[int, int]:
    """Return free and total memory of the machine in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _nothing(*_: object, **__: object) -> None:
    """Stand in for device calls that mean nothing on a CPU."""


class CpuDeviceModule(ModuleType):
    """``torch.cpu``, with those functions of ``torch.cuda`` that verl calls and ``torch.cpu`` lacks.

    It is a module of its own, because every library of the process would see names that are added to ``torch.cpu``.
    """

    empty_cache = ipc_collect = set_device = set_per_process_memory_fraction = staticmethod(_nothing)
    synchronize = reset_peak_memory_stats = staticmethod(_nothing)
    memory_allocated = memory_reserved = staticmethod(lambda *_: 0)
    max_memory_allocated = max_memory_reserved = staticmethod(_peak_memory)
    mem_get_info = staticmethod(_memory)
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)  # a process has one CPU device however many cores
    # verl looks up peak FLOPS by this name and knows none for a CPU: MFU is reported as zero.
    get_device_name = staticmethod(lambda *_: "CPU")
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class PlatformCPU(PlatformBase):
    """The CPU as a device named ``cpu``, which Ray counts as a ``GPU``."""

    device_name = vendor_name = "cpu"
    device_module = CpuDeviceModule("oar_cpu_device")
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl passes this to ``tensor.to``, which takes no index for a CPU

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # Ray's GPU accounting sets it; nothing reads it here

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"  # verl places its workers by it; the config group ``cpu`` sets how many Ray has

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights travel to vLLM through shared memory


def select() -> None:
    """Make the CPU the platform of this process. verl loads plugins before it asks for its platform."""
    if PlatformRegistry is None:
        before_platforms.select(PlatformCPU())
        return
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    if not isinstance(platform_manager._current_platform, PlatformCPU):
        set_platform(PlatformCPU())


def default_to_one_gloo(distributed: Any) -> None:
    """Make ``cpu:gloo`` the default process group of ``verl.utils.distributed``."""
    original = distributed.initialize_global_process_group_ray

    @wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


def meet_where_nobody_listens(base: Any) -> None:
    """Let process groups meet below the ports that the kernel gives out (``verl.single_controller.ray.base``).

    verl takes a free port, lets it go and tells it to the workers. Until the first of them listens there, the kernel may
    give it to a process that asks for any port, as each new worker of a local Ray does.
    """
    original = base.RayWorkerGroup._get_master_addr_port

    @wraps(original)
    def _get_master_addr_port(self: Any, pg: Any, bundle_index: int = 0, master_port_range: Any = None) -> Any:
        first = secrets.randbelow(BELOW_EPHEMERAL[1] - BELOW_EPHEMERAL[0] - 100) + BELOW_EPHEMERAL[0]
        return original(self, pg, bundle_index, master_port_range or [first, BELOW_EPHEMERAL[1]])

    base.RayWorkerGroup._get_master_addr_port = _get_master_addr_port
