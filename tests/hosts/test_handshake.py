"""The question to every node, asked of real Ray actors that stand in for verl's workers and servers."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl")

import ray
import verl  # noqa: F401  loads the plugin, as in a run

import oar_plugin
from oar_plugin.config import OarConfig
from oar_plugin.hosts.verl import handshake

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def actors():
    """Makers of actors, by value: nothing of this module goes to a process that has no plugin."""

    class Worker:
        def __init__(self, hidden=False, sources=None, engine="ours"):
            import importlib
            import os
            import sys
            from types import SimpleNamespace

            if engine != "ours":
                os.environ.pop("VERL_PLATFORM", None)  # without the plugin verl knows no platform `cpu`
            if hidden:
                sys.modules["oar_plugin"] = None
            if engine is None:  # nobody gets as far as asking for it, and its import takes ten seconds
                return
            if sources:
                sys.path.insert(0, sources)
            engines = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
            cls = engines.FSDPEngineWithLMHead
            if engine == "ours":
                base = importlib.import_module("verl.workers.engine.base")
                cls = base.EngineRegistry.get_engine_cls("language_model", "fsdp2")
            holds = SimpleNamespace(actor=SimpleNamespace(engine=object.__new__(cls)))
            self.worker_dict = {"actor_rollout": holds, "ref": SimpleNamespace(actor=None)}

        def ready(self):
            return True

        def busy(self):
            import time

            time.sleep(3600)

    class Server:
        """As vLLM's: an actor with coroutines."""

        def __init__(self, hidden=False):
            import importlib
            import sys

            if hidden:
                sys.modules["oar_plugin"] = None
            importlib.import_module("verl")

        async def ready(self):
            return True

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray.remote(num_cpus=0)(Worker), ray.remote(num_cpus=0)(Server)
    ray.shutdown()


@pytest.fixture(scope="module")
def good(actors):
    worker, server = actors
    made = worker.remote(), server.remote()
    ray.get([one.ready.remote() for one in made])
    return made


def test_processes_with_the_drivers_plugin_pass(good):
    worker, server = good
    handshake.check_nodes([worker, worker], [server], "fsdp", OarConfig(gate="python:tests.own_importance:upper_half"))


def test_processes_without_the_plugin_or_with_another_are_named(actors, good, tmp_path):
    worker, server = actors
    other = tmp_path / "oar_plugin"
    shutil.copytree(Path(oar_plugin.__file__).parent, other)
    (other / "estimator.py").open("a").write("# changed, and of the same version\n")
    off = {"env_vars": {"VERL_USE_EXTERNAL_PLUGINS": "none"}}
    workers = [
        good[0],
        worker.remote(hidden=True, engine=None),
        worker.options(runtime_env=off).remote(engine="verl's"),
        worker.remote(sources=str(tmp_path)),
    ]
    servers = [good[1], server.remote(hidden=True)]
    ray.get([one.ready.remote() for one in (*workers, *servers)])
    with pytest.raises(handshake.NodesDifferError) as raised:
        handshake.check_nodes(workers, servers, "fsdp", OarConfig())
    head, *lines, advice = str(raised.value).splitlines()
    here = handshake.make_question({})(None, None)
    assert here["plugin"] in head
    assert "Install" in advice
    assert all(line.startswith(f"  {here['node']}, ") for line in lines)
    hidden, silenced, changed, server_line = lines
    assert "actor worker 1: no oar_plugin (" in hidden
    assert "actor worker 2: " in silenced
    assert silenced.endswith("its engine is verl's own FSDPEngineWithLMHead: VERL_USE_EXTERNAL_PLUGINS=none")
    assert "actor worker 3: oar_plugin " in changed
    assert here["sources"] not in changed
    assert "rollout server 1: no oar_plugin (" in server_line


def test_an_actor_that_cannot_import_the_gate_is_told_at_the_start(good, tmp_path, monkeypatch):
    (tmp_path / "gate_of_the_driver.py").write_text("from tests.own_importance import upper_half\n")
    monkeypatch.syspath_prepend(tmp_path)  # Ray's processes were started before
    oar = OarConfig(gate="python:gate_of_the_driver:upper_half")
    with pytest.raises(
        handshake.NodesDifferError, match=r"worker 0: .*algorithm.oar.gate='python:gate.*cannot be imported"
    ):
        handshake.check_nodes(good[:1], good[1:], "fsdp", oar)


def _ask_until_it_is_dead(actor):
    while True:  # it does not die at once
        ray.get(actor.ready.remote())


def test_a_process_that_does_not_answer_or_has_died_is_told(actors, monkeypatch):
    monkeypatch.setattr(handshake, "TIME_LIMIT_S", 2.0)
    busy, dead = (actors[0].remote(engine=None) for _ in range(2))
    ray.get([busy.ready.remote(), dead.ready.remote()])
    busy.busy.remote()
    ray.kill(dead)
    with pytest.raises(ray.exceptions.RayActorError):
        _ask_until_it_is_dead(dead)
    with pytest.raises(handshake.NodesDifferError, match="actor worker 0: no answer within 2 s") as raised:
        handshake.check_nodes([busy, dead], [], "fsdp", OarConfig())
    assert "actor worker 1: no answer: ActorDiedError" in str(raised.value)
