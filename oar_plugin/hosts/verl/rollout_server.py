"""verl's vLLM server with a scoring method, and the replica that starts it.

The replica is registered in the driver of a run that offloads, under verl's own name `vllm` (verl tests the name elsewhere),
and starts verl's own server class for reward and teacher models.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from oar_plugin.hosts.vllm.scorer import ResponseScorer, ScoringResult, ScoringTask
from oar_plugin.hosts.vllm.throttle import Throttle

SUBMISSION_S = 60.0  # that an exchange of weights waits for copies on their way into the engine; verl: for generation
WORKER_EXTENSION = "oar_plugin.hosts.verl.rollout_worker.OarColocateWorkerExtension"


class OarVLLMHttpServer(vLLMHttpServer):
    """Generates as verl's server does, and scores responses while the engine has room beside generation."""

    max_in_flight: ClassVar[int]
    share_while_generating: ClassVar[float]

    # What the host's server provides.
    engine: Any  # vLLM's `AsyncLLM`
    global_steps: int
    lora_as_adapter: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._throttle = Throttle(self.max_in_flight, self.share_while_generating, self.config.max_num_seqs)
        self._open = asyncio.Event()
        self._open.set()
        self._leaving = False
        self._submitting = 0

    def _get_worker_extension_cls(self) -> str:
        return WORKER_EXTENSION

    @cached_property
    def _scorer(self) -> ResponseScorer:
        return ResponseScorer(self.engine, self._throttle, self.config.max_model_len, self._admit, self._lora_request)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """verl's `generate`, which the throttle is told of."""
        with self._throttle.generating():
            return await super().generate(*args, **kwargs)

    async def oar_score(self, task: ScoringTask, timeout_s: float) -> ScoringResult:
        """Score one response (`ResponseScorer.score`). The fault is `aborted` if the weights change meanwhile."""
        version = self.global_steps
        result = await self._scorer.score(task, timeout_s)
        if result.fault is None and self.global_steps != version:
            return replace(result, importance=None, fault="aborted")
        return result

    async def oar_wait_open(self) -> None:
        """Wait until copies are admitted, but not for a server that leaves verl's rotation: it may never come back."""
        if not self._leaving:
            await self._open.wait()

    # ---- a gate for copies; verl's own gate, for generation, differs between its versions

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> Any:
        """verl's method, which begins an exchange of weights. All copies are in the engine by then, and none may follow."""
        self._open.clear()
        self._leaving = kwargs.get("reject_request", False)
        deadline = time.monotonic() + SUBMISSION_S
        while self._submitting and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return await super().abort_all_requests(*args, **kwargs)

    async def resume_generation(self) -> None:
        await super().resume_generation()
        self._open.set()

    if hasattr(vLLMHttpServer, "open_submission_gate"):

        async def open_submission_gate(self) -> None:
            """verl's method, which ends an exchange of weights where verl has a gate."""
            await super().open_submission_gate()
            self._open.set()

    @asynccontextmanager
    async def _admit(self) -> AsyncIterator[None]:
        """Held while a copy is handed to the engine. At a closed gate generation waits and a copy is refused: it would be
        scored with other weights than the other copies of its response.
        """
        if not self._open.is_set():
            raise RuntimeError("weights are being exchanged")
        self._submitting += 1
        try:
            yield
        finally:
            self._submitting -= 1

    async def _lora_request(self) -> Any:
        """The adapter that generation uses; None: there is none."""
        if not self.lora_as_adapter or VLLM_LORA_INT_ID not in await self.engine.list_loras():
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=VLLM_LORA_NAME, lora_int_id=VLLM_LORA_INT_ID, lora_path=VLLM_LORA_PATH)


def register(max_in_flight: int, share_while_generating: float) -> None:
    """Let this driver start servers that can score. The arguments are those of `Throttle`."""
    settings = {"max_in_flight": max_in_flight, "share_while_generating": share_while_generating}
    # verl chooses the arguments of a server's constructor, so our settings travel with its class.
    server = ray.remote(type("ScoringServer", (OarVLLMHttpServer,), settings))

    class OarVLLMReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not (self.is_reward_model or self.is_teacher_model):
                self.server_class = server

    RolloutReplicaRegistry.register("vllm", lambda: OarVLLMReplica)
