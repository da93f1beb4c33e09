"""Weights from the actor to rollout engines in other processes, where there is no NCCL.

A checkpoint engine of verl's (`rollout.checkpoint_engine.backend=zmq`) for the trainer `separate_async`: verl's own
need CUDA or RDMA. Chosen by `rollout.checkpoint_engine.custom_backend_module`, verl's extension point.

A message is a tensor in safetensors' format. Nothing is unpickled: every user of the machine can reach a port of 127.0.0.1. The
last message is empty.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import zmq
import zmq.asyncio
from safetensors.torch import load, save
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("zmq")
class ZmqCheckpointEngine(CheckpointEngine):
    """The actor's first process pushes every tensor to every receiver; a receiver binds a socket of its own.

    Args:
        bucket_size: verl gives one to every engine; tensors travel one by one here.
        is_master: whether this is the actor's first process; verl gives it to the actor's only.
    """

    def __init__(self, bucket_size: int, is_master: bool | None = None) -> None:
        self._receives = is_master is None
        self._addresses: list[str] = []
        self._socket: Any = None

    def prepare(self) -> str | None:
        """Bind a receiver's socket; its address, None in the actor."""
        if not self._receives:
            return None
        if self._socket is None:
            self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
            self._address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        return self._address

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every address goes to the actor's first process, none to any other."""
        addresses = metadata[actor_wg_world_size:]
        nobody: list[list[str]] = [[] for _ in range(actor_wg_world_size - 1)]
        return {"addresses": [addresses, *nobody]}, {"addresses": [[] for _ in range(rollout_world_size)]}

    def init_process_group(self, addresses: list[str]) -> None:
        self._addresses = addresses

    def finalize(self) -> None:
        """Nothing is kept between two hand-overs but the receiver's socket."""

    async def send_weights(self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Push the weights. Every process walks through them: making each is collective."""
        context = zmq.asyncio.Context.instance()
        sockets = [context.socket(zmq.PUSH) for _ in self._addresses]
        for socket, address in zip(sockets, self._addresses, strict=True):
            socket.connect(address)
        try:
            for name, weight in weights:
                message = save({name: weight.detach().cpu().contiguous()})
                for socket in sockets:
                    await socket.send(message)
            for socket in sockets:
                await socket.send(b"")
        finally:
            for socket in sockets:
                socket.close()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        while message := await self._socket.recv():
            for named in load(message).items():
                yield named
