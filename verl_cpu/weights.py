"""Weights from the actor to rollout engines in other processes, where there is no NCCL.

A checkpoint engine for verl's trainer `separate_async` (`rollout.checkpoint_engine.backend=zmq`); verl's own need CUDA or RDMA.
The key `rollout.checkpoint_engine.custom_backend_module`, an extension point of verl, selects it.

A message is a tensor in safetensors' format, and the last message is empty. Nothing is unpickled, because every user of the
machine can reach a port of 127.0.0.1.
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
    """The actor's first process pushes every tensor to every receiver; each receiver binds a socket.

    Args:
        bucket_size: unused; tensors travel one by one.
        is_master: whether this is the actor's first process; None in a receiver.
    """

    def __init__(self, bucket_size: int, is_master: bool | None = None) -> None:
        self._receives = is_master is None
        self._addresses: list[str] = []
        self._socket: Any = None

    def prepare(self) -> str | None:
        """Bind a receiver's socket and return its address; None in the actor."""
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
        """Give every address to the actor's first process, and none to the others."""
        addresses = metadata[actor_wg_world_size:]
        nobody: list[list[str]] = [[] for _ in range(actor_wg_world_size - 1)]
        return {"addresses": [addresses, *nobody]}, {"addresses": [[] for _ in range(rollout_world_size)]}

    def init_process_group(self, addresses: list[str]) -> None:
        self._addresses = addresses

    def finalize(self) -> None:
        """Do nothing: the receiver's socket stays for the next transfer."""

    async def send_weights(self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Push the weights. Every process iterates over them, because making each is collective."""
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
