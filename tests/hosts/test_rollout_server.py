"""The scoring method of verl's vLLM server: its gate, its throttle, weights that change. The engine is made up here."""

import asyncio
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
from oar_plugin.hosts.vllm.scorer import Refused, ScoringResult, tagged_request


@pytest.fixture
def server(monkeypatch):
    config = SimpleNamespace(max_num_seqs=4)
    monkeypatch.setattr(vLLMHttpServer, "__init__", lambda self: vars(self).update(config=config))
    for name, value in {"max_in_flight": 2, "share_while_generating": 0.5}.items():
        monkeypatch.setattr(OarVLLMHttpServer, name, value, raising=False)
    made = OarVLLMHttpServer()
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


def exchange_begins(server, monkeypatch):
    """verl's own part of it, made up: what it was given, and the copies that were on their way in when it began."""
    seen = []

    async def abort_all_requests(self, **kwargs):
        seen.append((kwargs, self._submitting))

    async def resume(self):
        seen.append("resumed")

    monkeypatch.setattr(vLLMHttpServer, "abort_all_requests", abort_all_requests)
    for name in ("resume_generation", "open_submission_gate"):  # verl 0.9.1 has both, 0.9.0 the first
        monkeypatch.setattr(vLLMHttpServer, name, resume, raising=False)
    return seen


def test_no_copy_passes_a_closed_gate_and_the_exchange_waits_for_those_that_did(server, monkeypatch):
    seen = exchange_begins(server, monkeypatch)

    async def run():
        async with server._admit():
            exchange = asyncio.ensure_future(server.abort_all_requests())
            await asyncio.sleep(0.05)
            assert seen == []
        await exchange
        assert seen == [({}, 0)]
        with pytest.raises(Refused):
            await tagged_request(None, [1], OutcomeSpec("key", "copy", "last", 1), "salt", admit=server._admit)
        assert server._submitting == 0
        await server.resume_generation()
        monkeypatch.setattr(rollout_server, "SUBMISSION_S", 0.05)
        async with server._admit():
            await server.abort_all_requests()
        assert seen[-1] == ({}, 1), "a copy that never arrives holds up no exchange"

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["resume_generation", "open_submission_gate"])
def test_waiting_for_the_gate_ends_when_it_opens(server, monkeypatch, ends):
    seen = exchange_begins(server, monkeypatch)

    async def run():
        await server.oar_wait_open()
        await server.abort_all_requests()
        waiting = asyncio.ensure_future(server.oar_wait_open())
        await asyncio.sleep(0)
        assert not waiting.done()
        await getattr(server, ends)()
        await asyncio.wait_for(waiting, timeout=10)
        await server.abort_all_requests(reject_request=True)
        await server.oar_wait_open()  # not for a server that leaves
        assert seen[-1] == ({"reject_request": True}, 0)

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
