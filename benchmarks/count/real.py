"""The counted step on real tensors: FSDP2 on one CPU rank, bytes by PyTorch's profiler, collectives by its tracer.

One rank, because threads of gloo free the tensors of a collective between two ranks at any time.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed, multiprocessing
from torch.distributed.tensor.debug import CommDebugMode

from oar_plugin.runs.plan.count import Key, dimensions
from oar_plugin.runs.plan.fake_step import Step, tables_of
from oar_plugin.runs.plan.meter import Meter, Numbers

DENSE = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
DENSE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096}
LAYERS, LENGTH = 3, 512
SMALL = Key(dimensions(DENSE), LENGTH, entropy_rows=256, shards=1)
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


def counted(found: Numbers) -> Peaks:
    """Return the peaks and the number of collectives that the counter has for what `measured` measures."""
    peaks = {phase: max(found[phase].values()) for phase in ("log-probs", "importance")}
    update = {name: size for name, size in found["update"].items() if name != "optimizer"}
    peaks |= {"update": max(update.values()), "optimizer": found["update"]["optimizer"]}
    return peaks | {"collectives of log-probs": found["collectives"]["log-probs"]}


def measured(keys: Sequence[Key]) -> list[Peaks]:
    """Return, for each key, peak bytes by phase and the number of collectives. In a process of its own."""
    with TemporaryDirectory() as folder:
        multiprocessing.start_processes(_rank, args=(folder, keys), start_method="spawn")
        results: list[Peaks] = json.loads((Path(folder) / "peaks.json").read_text())
    return results


def _rank(rank: int, folder: str, keys: Sequence[Key]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=1)
    results = []
    for key in keys:
        tables, step = tables_of(key, LENGTH), Step(key, LAYERS, Meter())
        step.shard(distributed.init_device_mesh("cpu", (1,)))
        step.log_probs(8)
        peaks: Peaks = {"log-probs": profiled(lambda step=step: step.log_probs(LENGTH))}  # type: ignore[misc]
        assert tables is not None
        peaks["importance"] = profiled(lambda step=step, tables=tables: step.importance(LENGTH, tables))  # type: ignore[misc]
        step.update(8)
        peaks["update"] = profiled(lambda step=step: step.update(LENGTH))  # type: ignore[misc]
        with CommDebugMode() as traced:
            step.log_probs(LENGTH)
        optimizer = step.optimizer()
        optimizer()
        peaks |= {"optimizer": profiled(optimizer), "collectives of log-probs": traced.get_total_counts()}
        results.append(peaks)
    (Path(folder) / "peaks.json").write_text(json.dumps(results))
    distributed.destroy_process_group()
