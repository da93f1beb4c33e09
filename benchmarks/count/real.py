"""The counted step on real tensors: FSDP2 on one CPU rank, bytes by PyTorch's profiler.

One rank, because threads of gloo free the tensors of a collective between two ranks at any time.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed, multiprocessing

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
    with TemporaryDirectory() as folder:
        multiprocessing.start_processes(_rank, args=(folder, keys), start_method="spawn")
        results: list[Peaks] = json.loads((Path(folder) / "peaks.json").read_text())
    return results


def _rank(rank: int, folder: str, keys: Sequence[Memory]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=1)
    results = []
    for key in keys:
        length, tables, step = key.tokens, gradient_pass(key.tokens), Step(key, LAYERS, Meter())
        step.shard(distributed.init_device_mesh("cpu", (1,)))
        step.log_probs(8)
        peaks: Peaks = {"log-probs": profiled(lambda: step.log_probs(length))}  # noqa: B023
        peaks["importance"] = profiled(lambda: step.importance(length, tables))  # noqa: B023
        step.update(8)
        peaks["update"] = profiled(lambda: step.update(length))  # noqa: B023
        optimizer = step.optimizer()
        optimizer()
        results.append(peaks | {"optimizer": profiled(optimizer)})
    (Path(folder) / "peaks.json").write_text(json.dumps(results))
    distributed.destroy_process_group()
