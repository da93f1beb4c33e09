"""The question to every node, asked of real Ray actors that stand in for verl's workers and servers."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl")

import ray
import verl  # loads the plugin, as in a run

import oar_plugin
from oar_plugin.config import OarConfig
from oar_plugin.hosts.verl import handshake
from tests.limits import PROCESS_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def actors():
    """Makers of actors, by value: nothing of this module goes to a process that has no plugin."""

    class Worker:
        def __init__(self, engine, hidden=False, sources=None):
            import importlib
            import os
            import sys
            from types import SimpleNamespace

            if hidden:
                sys.modules["oar_plugin"] = None
            if sources:
                sys.path.insert(0, str(sources))
            if engine != "ours":
                os.environ.pop("VERL_PLATFORM", None)  # without the plugin verl knows no platform `cpu`
            if engine is None:  # nobody gets as far as asking for it, and its import takes ten seconds
                return
            cls = importlib.import_module("verl.workers.engine.fsdp.transformer_impl").FSDPEngineWithLMHead
            if engine == "ours":
                registry = importlib.import_module("verl.workers.engine.base").EngineRegistry
                cls = registry.get_engine_cls("language_model", "fsdp2")
            holds = SimpleNamespace(actor=SimpleNamespace(engine=object.__new__(cls)))
            self.worker_dict = {"actor_rollout": holds, "ref": SimpleNamespace(actor=None)}

        def work(self, seconds=0):
            import time

            time.sleep(seconds)

    class Server(Worker):
        async def work(self):
            """As vLLM's: an actor with coroutines."""

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray.remote(num_cpus=0)(Worker), ray.remote(num_cpus=0)(Server)
    ray.shutdown()


@pytest.fixture(scope="module")
def good(actors):
    return actors[0].remote("ours"), actors[1].remote(None)


def test_processes_with_the_drivers_plugin_pass(good):
    worker, server = good
    handshake.check_nodes([worker, worker], [server], "fsdp", OarConfig(gate="python:tests.own_importance:upper_half"))


def test_processes_without_the_plugin_or_with_another_are_named(actors, good, tmp_path):
    worker, server = actors
    shutil.copytree(Path(oar_plugin.__file__).parent, tmp_path / "changed" / "oar_plugin")
    (tmp_path / "changed" / "oar_plugin" / "estimator.py").open("a").write("# changed, and of the same version\n")
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "oar_plugin.py").write_text("__version__ = '0.0.1'\n")
    off = {"env_vars": {"VERL_USE_EXTERNAL_PLUGINS": "none"}}
    workers = [
        good[0],
        worker.remote(None, hidden=True),
        worker.options(runtime_env=off).remote("verl's"),
        worker.remote("ours", sources=tmp_path / "changed"),
        worker.remote(None, sources=tmp_path / "older"),
    ]
    servers = [good[1], server.remote(None, hidden=True)]
    with pytest.raises(RuntimeError, match="needs the same oar_plugin on every node") as raised:
        handshake.check_nodes(workers, servers, "fsdp", OarConfig())
    head, *lines, advice = str(raised.value).splitlines()
    assert f"The driver has oar_plugin {oar_plugin.__version__} with verl {verl.__version__}" in head
    assert "Install" in advice
    node = f"  node {ray.util.get_node_ip_address()}: "
    assert lines[0].startswith(f"{node}no oar_plugin (")  # of a worker and of a server
    assert lines[1:] == [
        f"{node}its engine is verl's own FSDPEngineWithLMHead: see VERL_USE_EXTERNAL_PLUGINS there, and the process's log",
        f"{node}other code of the same version",
        f"{node}oar_plugin 0.0.1 with verl {verl.__version__}",
    ]


def test_an_actor_that_cannot_import_the_gate_is_told_at_the_start(good, tmp_path, monkeypatch):
    (tmp_path / "gate_of_the_driver.py").write_text("from tests.own_importance import upper_half\n")
    monkeypatch.syspath_prepend(tmp_path)  # Ray's processes were started before
    oar = OarConfig(gate="python:gate_of_the_driver:upper_half")
    with pytest.raises(RuntimeError, match=r"node .*: algorithm.oar.gate='python:gate.*cannot be imported"):
        handshake.check_nodes(good[:1], good[1:], "fsdp", oar)


def test_a_process_that_does_not_answer_or_has_died_is_told(actors, monkeypatch):
    monkeypatch.setattr(handshake, "TIME_LIMIT_S", 2.0)
    busy, dead = (actors[0].remote(None) for _ in range(2))
    ray.get([busy.work.remote(), dead.work.remote()])
    busy.work.remote(3600)
    ray.kill(dead)
    assert ray.wait([dead.work.remote(3600)], timeout=PROCESS_S)[0], "it does not die at once"
    with pytest.raises(RuntimeError, match="actor worker 0: no answer within 2 s") as raised:
        handshake.check_nodes([busy, dead], [], "fsdp", OarConfig())
    assert "actor worker 1: no answer: ActorDiedError" in str(raised.value)
