"""The counted step on real tensors: FSDP2 on one CPU rank, bytes by PyTorch's profiler.

One rank, because threads of gloo free the tensors of a collective between two ranks at any time.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import distributed

from benchmarks.count.fake_step import Step, gradient_pass
from benchmarks.count.meter import Meter, Numbers
from benchmarks.count.shapes import Memory

DENSE = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
DENSE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096}
LAYERS = 3
SMALL = Memory(json.dumps(DENSE, sort_keys=True), tokens=512, entropy_rows=256, shards=1)
Peaks = dict[str, float]


def profiled(run: Callable[[], object]) -> int:
    """Return the most bytes that `run` has at once beyond what is there before it, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    live = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    return most


def counted(numbers: Numbers) -> Peaks:
    """Return the peaks that the counter has for what `measured` measures."""
    update = {part: size for part, size in numbers["update"].items() if part != "optimizer"}
    peaks = {phase: max(numbers[phase].values()) for phase in ("log-probs", "importance")}
    return peaks | {"update": max(update.values()), "optimizer": numbers["update"]["optimizer"]}


def measured(keys: Sequence[Memory]) -> list[Peaks]:
    """Return, for each key, peak bytes by phase. In a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measured, keys).result()


def _measured(keys: Sequence[Memory]) -> list[Peaks]:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return [_peaks(key) for key in keys]


def _peaks(key: Memory) -> Peaks:
    length, tables, step = key.tokens, gradient_pass(key.tokens), Step(key, LAYERS, Meter())
    step.shard(distributed.init_device_mesh("cpu", (1,)))
    step.log_probs(8)
    peaks: Peaks = {"log-probs": profiled(lambda: step.log_probs(length))}
    peaks["importance"] = profiled(lambda: step.importance(length, tables))
    step.update(8)
    peaks["update"] = profiled(lambda: step.update(length))
    optimizer = step.optimizer()
    optimizer()
    return peaks | {"optimizer": profiled(optimizer)}
