"""The scoring method of verl's vLLM server: its gate, its throttle, weights that change. The engine is made up here."""

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from oar_plugin.hosts.verl import rollout_server
from oar_plugin.hosts.verl.rollout_server import OarVLLMHttpServer
from oar_plugin.hosts.verl.rollout_worker import OarColocateWorkerExtension
from oar_plugin.hosts.vllm.outcomes import OutcomeSpec
from oar_plugin.hosts.vllm.request import Refused, tagged_request
from oar_plugin.hosts.vllm.scorer import ScoringResult


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(
        vLLMHttpServer, "__init__", lambda self: vars(self).update(config=SimpleNamespace(max_num_seqs=4))
    )
    for name, value in {"max_in_flight": 2, "share_while_generating": 0.5}.items():
        monkeypatch.setattr(OarVLLMHttpServer, name, value, raising=False)
    monkeypatch.setenv(rollout_server.RUNNER, "")  # so that it is restored in the end
    monkeypatch.delenv(rollout_server.RUNNER)
    made = OarVLLMHttpServer()
    assert os.environ[rollout_server.RUNNER] == "0", "the first model runner is asked for"
    made._submission_paused = made._rejecting = False
    made._admitting = 0
    made._resume_event = asyncio.Event()
    made.global_steps = 3
    return made


@pytest.mark.parametrize(
    ("steps_meanwhile", "fault", "importance"), [(0, None, [1, 1]), (1, "aborted", None)], ids=["same", "new weights"]
)
def test_a_score_passes_through_unless_the_weights_changed_meanwhile(server, steps_meanwhile, fault, importance):
    async def score(task, timeout_s):
        server.global_steps += steps_meanwhile
        return ScoringResult(np.ones(2, dtype=np.float32), None, copies=2)

    server._scorer = SimpleNamespace(score=score)
    result = asyncio.run(server.oar_score(None, 1.0))
    assert (result.fault, result.copies) == (fault, 2)
    assert (None if result.importance is None else result.importance.tolist()) == importance


def test_no_copy_passes_a_closed_gate_and_the_exchange_waits_for_those_that_did(server):
    async def run():
        async with server._admit():
            assert server._admitting == 1
        assert server._admitting == 0
        server._submission_paused = True
        with pytest.raises(Refused):
            await tagged_request(None, [1], OutcomeSpec("key", "copy", "last", 1), "salt", admit=server._admit)
        assert server._admitting == 0

    asyncio.run(run())


def test_waiting_for_the_gate_ends_when_it_opens(server):
    async def run():
        await server.oar_wait_open()
        server._submission_paused = True
        waiting = asyncio.ensure_future(server.oar_wait_open())
        await asyncio.sleep(0)
        assert not waiting.done()
        server._submission_paused = False
        server._resume_event.set()
        await waiting

    asyncio.run(run())


def test_generation_is_what_the_throttle_looks_at(server, monkeypatch):
    seen = []

    async def generate(self, *args, **kwargs):
        seen.append(self._throttle._generating)
        return "text"

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    assert asyncio.run(server.generate([1])) == "text"
    assert seen == [1]
    assert server._throttle._generating == 0


def test_a_user_who_asks_for_the_second_runner_is_told(monkeypatch):
    monkeypatch.setenv(rollout_server.RUNNER, "1")
    with pytest.raises(RuntimeError, match=r"VLLM_USE_V2_MODEL_RUNNER=1.*backend=actor"):
        OarVLLMHttpServer()


def test_the_policys_servers_score_and_no_other(monkeypatch):
    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))

    def init(self, role):
        self.is_reward_model, self.is_teacher_model = role == "reward", role == "teacher"
        self.server_class = "verl's own"

    monkeypatch.setattr(vLLMReplica, "__init__", init)
    rollout_server.register(7, 0.3)
    replica = RolloutReplicaRegistry.get("vllm")
    ours = replica("policy").server_class.__ray_metadata__.modified_class
    assert issubclass(ours, OarVLLMHttpServer)
    assert (ours.max_in_flight, ours.share_while_generating) == (7, 0.3)
    assert replica("reward").server_class == replica("teacher").server_class == "verl's own"


def test_the_worker_extension_is_verls_with_ours_beside_it(monkeypatch):
    done = []
    monkeypatch.setattr(vLLMColocateWorkerExtension, "monkey_patch_model", lambda self, **kwargs: done.append(kwargs))
    monkeypatch.setattr(OarColocateWorkerExtension, "oar_install", lambda self: done.append("installed"))
    object.__new__(OarColocateWorkerExtension).monkey_patch_model(10, [3])
    assert done == [{"vocab_size": 10, "banned_token_ids": [3]}, "installed"]
    path = f"{OarColocateWorkerExtension.__module__}.{OarColocateWorkerExtension.__qualname__}"
    assert path == rollout_server.WORKER_EXTENSION
