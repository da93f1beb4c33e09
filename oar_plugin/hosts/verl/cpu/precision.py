"""Megatron in single precision. The day it can go: verl's configuration admits fp32 for its Megatron engine."""

from types import ModuleType
from typing import Any


def admit_float32(config: ModuleType) -> None:
    """Let verl's Megatron engine run in fp32: on a CPU bf16 is slow, and in fp32 actor and rollout can be compared."""
    engine_config: Any = config.McoreEngineConfig
    check = engine_config.__post_init__

    def post_init(self: Any) -> None:
        wanted = self.dtype
        object.__setattr__(self, "dtype", "bfloat16")
        check(self)
        object.__setattr__(self, "dtype", wanted)

    engine_config.__post_init__ = post_init
