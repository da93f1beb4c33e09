"""The entry point: what it registers, that it is inert, and that it is loud."""

import subprocess
import sys

import pytest

pytest.importorskip("verl")

import verl  # noqa: F401
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.workers.engine.base import EngineRegistry

from oar_plugin.hosts.verl import fsdp, plugin, trainer
from tests.hosts.test_settings import config
from tests.limits import PROCESS_S


@pytest.mark.parametrize(
    "name", ["wrapt", "pydantic", "oar_plugin.hosts.verl.capabilities", "oar_plugin.hosts.verl.hydra_conf"]
)
def test_a_missing_dependency_or_a_broken_module_is_printed_with_what_to_do_and_does_not_raise(name):
    code = f"import sys; sys.modules[{name!r}] = None; import oar_plugin.hosts.verl.plugin; print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S, check=True)
    first, *_, cause, advice = done.stderr.strip().splitlines()
    assert done.stdout == "goes on\n"
    assert first.startswith("oar_plugin failed to load, so algorithm.adv_estimator=oar is unknown")
    assert name.rpartition(".")[2] in cause
    assert advice == plugin.ADVICE


@pytest.mark.parametrize("silenced", [False, True])
def test_our_warnings_are_heard_once_whatever_the_root_logger_does(silenced):
    silence = "logging.root.setLevel('ERROR'); logging.root.handlers[0].setLevel('ERROR')"  # as vLLM's API server does
    code = f"""
import logging
logging.basicConfig(level="WARNING")
import oar_plugin.hosts.verl.plugin
{silence if silenced else ""}
logging.getLogger("oar_plugin.somewhere").warning("look here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S, check=True)
    assert done.stderr.count("look here") == 1


@pytest.mark.slow
def test_importing_verl_does_not_import_the_trainers():
    """Start-up time is paid by every process of a cluster."""
    code = "import verl, sys; print([m for m in sys.modules if m.startswith(('verl.trainer.ppo.v1', 'vllm'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_trainers_are_ours_for_oar_and_verls_own_for_everything_else(mode, monkeypatch):
    ours = get_trainer_cls(mode)
    host = ours.host
    assert ours.__name__.startswith("Oar")
    monkeypatch.setattr(host, "__init__", lambda self, config: None)

    def build(estimator):
        return get_trainer_cls(mode)(config=config(algorithm__adv_estimator=estimator, trainer__v1__trainer_mode=mode))

    assert [type(build(estimator)) for estimator in ("grpo", "gae", "oar")] == [host, host, ours]


def test_an_engine_of_another_kind_of_machine_is_left_alone(monkeypatch):
    """A driver without a GPU imports verl's engines and builds none: there is nothing to subclass."""
    engines = EngineRegistry._engines["language_model"]
    before = {backend: dict(registered) for backend, registered in engines.items()}
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "a device of nobody's")
    fsdp.register()
    assert before == engines


def test_trainers_and_engines_are_made_of_what_is_registered_unless_that_is_not_verls():
    engines, Foreign = EngineRegistry._engines["language_model"]["fsdp2"], type("Foreign", (), {})
    (device,) = (key for key, engine in engines.items() if issubclass(engine, fsdp.OarFSDPMixin))
    trainers = trainer_base.TRAINER_REGISTRY
    for registry, key, register in ((trainers, "sync", trainer.register), (engines, device, fsdp.register)):
        ours = registry[key]
        try:
            register()
            assert registry[key] is ours, "a second time changes nothing"
            registry[key] = theirs = type("Theirs", (ours.host,), {})
            register()
            assert registry[key].host is theirs
            registry[key] = Foreign
            with pytest.raises(RuntimeError, match=r"(sync|fsdp2).* already replaced by .*Foreign"):
                register()
            assert registry[key] is Foreign
        finally:
            registry[key] = ours
