"""Bytes that FSDP2 sends, counted in a run of two processes on this machine, beside the planner's formulas.

The model is sharded as verl shards it (each layer, an untied embedding, the root), and runs the passes of `oar_plugin.bench`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tiny.random_models import Shape, build_batch, build_shape
from oar_plugin.plan import communication
from oar_plugin.plan.shape import shape_of

RANKS = 2
UNTIED = Shape(128, 352, 4, 4, 2, tied=False, vocab=2048)
TIMEOUT_S = 120.0

Row = tuple[str, str, float, float]
"""Model, quantity, predicted, counted."""


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends in collectives over a ring, as communication.py does.

    Attributes:
        sent: bytes so far.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.sent = 0.0
        self._ranks = ranks

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = getattr(func, "overloadpacket", func)
        if packet is torch.ops.c10d._allgather_base_:
            self.sent += communication.ring(self._ranks) * _size(args[0])
        elif packet is torch.ops.c10d._reduce_scatter_base_:
            self.sent += communication.ring(self._ranks) * _size(args[1])
        elif packet is torch.ops.c10d.allreduce_:
            self.sent += 2 * communication.ring(self._ranks) * sum(_size(x) for x in args[0])
        return func(*args, **(kwargs or {}))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def compare_collectives() -> list[Row]:
    """Log-probs, importance and update of one micro-batch under FSDP2 with two processes.

    Raises:
        RuntimeError: a process failed or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(_rank, args=(folder,), nprocs=RANKS, join=False, start_method="spawn")
        deadline = time.monotonic() + TIMEOUT_S
        # join returns as soon as one process has ended, and says whether it was the last.
        while not (ended := context.join(timeout=1.0)) and time.monotonic() < deadline:
            pass
        if not ended:
            for process in context.processes:
                process.kill()
            raise RuntimeError(f"the {RANKS} processes that count collectives did not end within {TIMEOUT_S:.0f} s")
        rows: list[Row] = torch.load(Path(folder) / "rows.pt")
        return rows


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        rows = _count()
        if rank == 0:
            torch.save(rows, Path(folder) / "rows.pt")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _count() -> list[Row]:
    from oar_plugin.plan.check import ANSWER, PROMPT, RESPONSE, build_passes

    device = torch.device("cpu")
    model = build_shape(UNTIED, "llama", UNTIED.vocab, PROMPT + RESPONSE, torch.float32, device, 0)
    shape = shape_of(model.config)
    _shard(model)
    passes = build_passes(model, build_batch(4, PROMPT, RESPONSE, ANSWER, 4, device, 0))
    gather = communication.fsdp_gather(shape.parameters, RANKS, 4)
    reduced = communication.fsdp_reduce(shape.parameters, RANKS)
    works: list[tuple[str, Callable[[], object], float]] = [
        ("log-probs", lambda: passes.log_prob(1), gather),
        ("log-probs and importance, recomputation", lambda: passes.fused(1, True), 2 * gather),
        ("update, recomputation", lambda: passes.update(1, True), 2 * gather + reduced),
    ]
    rows = []
    for what, work, predicted in works:
        _reshard(model)
        with SentBytes(RANKS) as counter:
            work()
        rows.append((f"llama, FSDP2 over {RANKS}", f"bytes sent, {what}", predicted, counter.sent))
    return rows


def _shard(model: nn.Module) -> None:
    decoder: Any = model.get_submodule("model")
    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    for module in (*decoder.layers, decoder.embed_tokens, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


def _reshard(model: nn.Module) -> None:
    assert isinstance(model, FSDPModule)
    model.reshard()
