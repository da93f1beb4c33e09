"""What is said of a verl: its version, what it lacks, and that a run which asks for that is told while others are not."""

import importlib
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import verl

from oar_plugin.config import OarConfigError
from oar_plugin.hosts.required_api import requirements
from oar_plugin.hosts.verl import capabilities, hydra_conf, plugin
from oar_plugin.hosts.verl.capabilities import accepted, missing, unchecked, version_note
from oar_plugin.hosts.verl.settings import resolve_here
from tests.hosts.test_settings import OFFLOAD, config
from tests.limits import PROCESS_S


def test_a_module_that_cannot_be_imported_here_was_not_checked_and_is_not_missing(monkeypatch):
    def fail(module):
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert unchecked("sync") == []
    monkeypatch.setattr(importlib, "import_module", fail)
    modules = requirements(capabilities.FEATURES["fsdp"]).modules
    capabilities._unimportable.cache_clear()
    lines = unchecked("fsdp")
    capabilities._unimportable.cache_clear()
    assert len(lines) == len(modules)
    assert all("(OSError: libcuda.so.1" in line for line in lines)
    assert missing("fsdp") == []


def test_the_version_is_verls_own():
    assert capabilities.host_version() == verl.__version__


@pytest.mark.parametrize(
    "version", ["0.8.0", "0.9.0", "0.9.1", "0.9.2", "0.10.0.dev", "0.10.0.dev0+gabc", "0.10.0", "1.2", "0.1-fork"]
)
def test_no_version_is_refused_for_its_number_but_one_that_is_too_old(version, monkeypatch):
    monkeypatch.setattr(capabilities, "host_version", lambda: version)
    assert missing("ray_trainer") == missing("fsdp") == []
    assert (version_note() is None) == (version in (*capabilities.TRIED, "0.9.2"))


@pytest.mark.parametrize("version", ["0.7.1", "0.1"])
def test_a_version_that_is_too_old_is_refused(version, monkeypatch):
    monkeypatch.setattr(capabilities, "host_version", lambda: version)
    (fault,) = missing("ray_trainer")
    assert [fault] == missing("sync") == missing("fsdp") == missing("offload")
    assert version in fault
    assert f"{capabilities.OLDEST} or newer" in fault


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A function that puts a file in the place of one of verl's modules."""

    def put(module, text):
        path = tmp_path / f"{module}.py"
        path.write_text(text, encoding="utf-8")
        looked = capabilities.path_of
        monkeypatch.setattr(capabilities, "path_of", lambda name: path if name == module else looked(name))

    return put


def test_v1_trainers_that_the_program_does_not_start_are_missing(place):
    place("verl.trainer.main_ppo", "raise RuntimeError")
    assert len(missing("sync")) == len(missing("separate_async")) == 1
    assert missing("ray_trainer") == []


@pytest.mark.parametrize("named", ["", "mine", f"mine,{capabilities.PLUGIN}"])
@pytest.mark.parametrize("looks_for_plugins", [True, False])
def test_a_verl_that_does_not_look_for_plugins_is_told_to_import_ours(looks_for_plugins, named, place, monkeypatch):
    place("verl", '_entry_points(group="verl.plugins")' if looks_for_plugins else "")
    monkeypatch.setenv(capabilities.EXTERNAL_MODULES, named)
    told = capabilities.external_modules()
    if looks_for_plugins or capabilities.PLUGIN in named:
        assert told == {}
        return
    value = f"{capabilities.PLUGIN},{named}".strip(",")
    assert told == {capabilities.EXTERNAL_MODULES: value}
    monkeypatch.setattr(capabilities, "host_version", lambda: "0.8.0")
    with pytest.raises(OarConfigError, match=f"{capabilities.EXTERNAL_MODULES}={value} on every node"):
        resolve_here(config())


ASKS = [  # feature, changes, what asks for it, what is allowed
    ("separate_async", {"trainer__v1__trainer_mode": "separate_async"}, "trainer.v1.trainer_mode=separate_async", "sync"),
    ("fsdp", {}, "actor_rollout_ref.actor.strategy=fsdp2", "megatron"),
    ("megatron", {"actor_rollout_ref__actor__strategy": "megatron"}, "actor_rollout_ref.actor.strategy=megatron",
     "fsdp, fsdp2"),
    ("ray_trainer", {"trainer__use_v1": False}, "trainer.use_v1=False", "True"),
    ("ray_trainer", {"trainer__use_v1": None}, "algorithm.adv_estimator=oar", "nothing"),  # verl 0.8 has no such key
    ("offload", OFFLOAD, "algorithm.oar.perturbation.backend=rollout", "actor"),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "changes", "asked", "allowed"), ASKS)
def test_a_run_that_asks_for_what_is_missing_is_told_and_no_other(feature, changes, asked, allowed, monkeypatch):
    monkeypatch.setattr("oar_plugin.hosts.verl.offload.faults", lambda config: [])
    monkeypatch.setattr(capabilities, "missing", lambda name: ["x: f takes (a)"] if name == feature else [])
    with pytest.raises(OarConfigError) as refused:
        resolve_here(config(**changes))
    text = str(refused.value)
    assert text.startswith(f"{asked}: not supported on this verl ({verl.__version__})")
    assert "(x: f takes (a))" in text
    assert f"allowed: {allowed}" in text
    strategy = "megatron" if feature == "fsdp" else "fsdp"
    for other, others, *_ in ASKS:
        if other not in (feature, "fsdp"):
            assert resolve_here(config(**{"actor_rollout_ref__actor__strategy": strategy} | others))


DOCTORED = """
import verl
from oar_plugin.hosts.verl import capabilities
looked = capabilities.missing
capabilities.missing = lambda feature: ["f is gone"] if feature in ("separate_async", "fsdp") else looked(feature)
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.engine.base import EngineRegistry
print("FOUND", *(get_trainer_cls(mode).__name__ for mode in capabilities.TRAINERS))
print("FOUND", EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""


def test_what_does_not_fit_stays_verls_own_and_no_process_says_a_word_about_it():
    command = [sys.executable, "-c", DOCTORED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=True)
    *trainers, engine = " ".join(line[6:] for line in done.stdout.splitlines() if line.startswith("FOUND ")).split()
    assert trainers == ["OarTrainerSync", "OarTrainerColocateAsync", "PPOTrainerSeparateAsync"]
    assert not engine.startswith("Oar")
    assert "oar_plugin" not in done.stderr
    assert "f is gone" not in done.stdout + done.stderr


def test_the_check_before_a_run_notes_a_new_version_and_leaves_the_environment_as_it_was(monkeypatch, caplog):
    """Ray's workers inherit it, and vLLM sets variables when it is imported."""
    monkeypatch.setattr(hydra_conf, "resolve_here", lambda config: os.environ.update(OAR_TEST="set", PATH="changed"))
    monkeypatch.setattr(capabilities, "host_version", lambda: "1.2")
    before = dict(os.environ)
    with caplog.at_level(logging.WARNING):
        hydra_conf.CheckAtStart().on_run_start(config())
    assert dict(os.environ) == before
    assert "verl 1.2 was not tried with OAR" in caplog.text


@pytest.mark.parametrize("lacking", [[], ["x: f takes (a)"]])
def test_outside_of_our_trainers_the_estimator_explains_itself_and_says_what_is_missing(lacking, monkeypatch):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    monkeypatch.setattr(capabilities, "missing", lambda feature: lacking if feature == "sync" else [])
    with pytest.raises(RuntimeError, match="outside of OAR's trainers") as raised:
        get_adv_estimator_fn("oar")()
    said = [line for line in str(raised.value).splitlines() if "f takes" in line]
    assert said == [f"this verl: {fault}" for fault in lacking]


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_feature_that_does_not_fit_is_verls_and_only_what_nobody_foresaw_is_a_warning(foreseen, monkeypatch, caplog):
    """The hooks run in every process of every run, where an exception would come out of verl's own import."""

    def missing(feature):
        if foreseen:
            return ["x: f takes (a)"]
        raise OSError("a folder without a version file")

    monkeypatch.setattr(capabilities, "missing", missing)
    monkeypatch.delitem(sys.modules, "oar_plugin.hosts.verl.fsdp")
    with caplog.at_level(logging.INFO, logger="oar_plugin"):
        plugin._register_engines(SimpleNamespace(__name__="verl.workers.engine"))
    assert "oar_plugin.hosts.verl.fsdp" not in sys.modules, "imported, and so registered, all the same"
    assert {record.levelname for record in caplog.records} == {"INFO" if foreseen else "WARNING"}
    assert ("x: f takes (a)" if foreseen else "a folder without a version file") in caplog.text


def test_arguments_that_this_verl_does_not_take_are_left_out():
    assert accepted(lambda request_id: None, prompt_ids=[1]) == {}
    assert accepted(lambda request_id, **extra: None, prompt_ids=[1]) == {"prompt_ids": [1]}
    assert accepted(lambda server_id, request_id=None: None, request_id="a", other=1) == {"request_id": "a"}
