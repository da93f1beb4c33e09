"""What the plugin touches of verl: the list is whole, what is missing is found and named, and only that is refused."""

import ast
import importlib
import inspect
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("verl")

import verl

import oar_plugin.hosts.verl
from oar_plugin.config import OarConfigError
from oar_plugin.hosts.verl import capabilities, hydra_conf, plugin
from oar_plugin.hosts.verl.capabilities import FEATURES, TRAINERS, Use, accepted, missing, unchecked, version_note
from oar_plugin.hosts.verl.settings import resolve_here
from tests.hosts.test_settings import OFFLOAD, config
from tests.limits import PROCESS_S

FOLDER = Path(oar_plugin.hosts.verl.__file__).parent
# Our modules, and the features that they make.
MODULES = {
    "trainer": tuple(TRAINERS),
    "balancing": (*TRAINERS, "fsdp", "megatron"),
    "importance_pass": ("fsdp", "megatron"),
    "fsdp": ("fsdp",),
    "megatron": ("megatron",),
    "agent_loop": ("offload",),
    "rollout_server": ("offload",),
    "rollout_worker": ("offload",),
}
NEEDS = {"megatron": "megatron.core", "offload": "vllm"}  # to be imported at all

features = pytest.mark.parametrize(
    "feature",
    [
        pytest.param(feature, marks=pytest.mark.skipif(find_spec(need.split(".")[0]) is None, reason=f"without {need}"))
        if (need := NEEDS.get(feature))
        else feature
        for feature in FEATURES
    ],
)


@features
def test_this_verl_has_all_of_it_and_all_of_it_was_looked_at(feature):
    assert missing(feature) == unchecked(feature) == []


def imported(module):
    """What a module of ours imports from verl: pairs of module and name."""
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
            yield from ((node.module, alias.name) for alias in node.names)


def test_every_module_of_ours_that_imports_verl_is_looked_at_here():
    light = {"recipe", "best_checkpoint"}  # verl's own check of a configuration; named only where verl can have it
    found = {file.stem for file in FOLDER.glob("*.py") if any(imported(file.stem))}
    assert found - light == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_import_is_listed(module):
    for feature in MODULES[module]:
        listed = {(use.module, use.name.split(".")[0]) for use in FEATURES[feature]}
        modules = {use.module for use in FEATURES[feature]}
        for place, name in imported(module):
            assert (place, name) in listed or f"{place}.{name}" in modules, (feature, place, name)


@features
def test_our_own_methods_take_the_parameters_that_are_listed(feature):
    """For each of verl's methods that we override: by the class that stands in verl's place."""
    ours = [
        value
        for module, of in MODULES.items()
        if feature in of
        for value in vars(importlib.import_module(f"oar_plugin.hosts.verl.{module}")).values()
        if isinstance(value, type) and value.__module__.startswith("oar_plugin")
    ]
    for use in FEATURES[feature]:
        if use.override is None:
            continue
        methods = [vars(cls)[name] for cls in ours if (name := use.name.split(".")[-1]) in vars(cls)]
        assert methods, use.name
        parameters = list(inspect.signature(methods[0]).parameters.values())[1:]
        assert tuple(map(capabilities._shown, parameters)) == use.override, use.name


def places_of(use):
    """What holds the thing that is listed, a class and bases of it say, and its name there; nothing where instances do."""
    owner = importlib.import_module(use.module)
    *path, name = use.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    classes = getattr(owner, "__mro__", ())
    if any(capabilities._sets(cls, name) for cls in classes):
        return []
    return [(holder, name) for holder in classes or (owner,) if name in vars(holder)]


@features
def test_whatever_is_taken_away_is_named(feature, monkeypatch):
    taken = 0
    for use in FEATURES[feature]:
        with monkeypatch.context() as doctored:
            for place in (places := places_of(use)):
                doctored.delattr(*place)
            taken += bool(places)
            assert (f"{use.module}: {use.name} is not there" in missing(feature)) == bool(places), use
    assert taken > len(FEATURES[feature]) / 2
    assert missing(feature) == []


@features
def test_a_function_that_takes_other_arguments_is_found(feature, monkeypatch):
    def other(self=None, *, renamed):
        """Neither what we pass nor what we override."""

    for use in FEATURES[feature]:
        if use.call is None and use.override is None:
            continue
        with monkeypatch.context() as doctored:
            doctored.setattr(*places_of(use)[0], other)
            assert any(line.startswith(f"{use.module}: {use.name} takes (") for line in missing(feature)), use


def test_a_renamed_parameter_and_one_more_are_found(monkeypatch):
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils import tensordict_utils

    monkeypatch.setattr(tensordict_utils, "pop", lambda data, name, default: None)
    (line,) = missing("fsdp")
    assert "pop takes (data, name, default); OAR calls it with (_, key=, default=)" in line
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics, step=0: None)
    (line,) = missing("sync")
    assert line.endswith("_compute_advantage takes (batch, metrics, step); OAR's own takes (batch, metrics)")


def test_a_module_that_is_gone_is_missing_and_one_that_lacks_a_package_was_not_looked_at(monkeypatch):
    gone, broken = Use("verl.no.such.module", "x"), Use("tests.hosts.verl_without_a_package", "x")
    monkeypatch.setattr(capabilities, "FEATURES", {"gone": (gone,), "broken": (broken,)})
    assert missing("gone") == ["verl.no.such.module is not there"]
    assert unchecked("gone") == []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == broken.module:
                raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert missing("broken") == []
    (line,) = unchecked("broken")
    assert "libcuda.so.1" in line


def test_the_version_is_verls_own():
    assert capabilities.host_version() == verl.__version__


@pytest.mark.parametrize(
    "version", ["0.9.0", "0.9.1", "0.9.2", "0.10.0.dev", "0.10.0.dev0+gabc", "0.10.0", "1.2", "0.1-fork"]
)
def test_no_version_is_refused_for_its_number_but_one_without_a_v1_trainer(version, monkeypatch):
    monkeypatch.setattr(capabilities, "host_version", lambda: version)
    assert missing("sync") == []
    assert (version_note() is None) == (version in (*capabilities.TRIED, "0.9.2"))


def test_a_version_without_a_v1_trainer_is_refused(monkeypatch):
    monkeypatch.setattr(capabilities, "host_version", lambda: "0.8.0")
    assert missing("sync") == missing("offload") == ["verl 0.8.0 has no v1 trainer; OAR needs verl 0.9.0 or newer"]


ASKS = {
    "separate_async": ({"trainer__v1__trainer_mode": "separate_async"}, "trainer.v1.trainer_mode=separate_async", "sync"),
    "fsdp": ({}, "actor_rollout_ref.actor.strategy=fsdp2", "megatron"),
    "megatron": (
        {"actor_rollout_ref__actor__strategy": "megatron"},
        "actor_rollout_ref.actor.strategy=megatron",
        "fsdp, fsdp2",
    ),
    "offload": (OFFLOAD, "algorithm.oar.perturbation.backend=rollout", "actor"),
}  # fmt: skip


@pytest.mark.parametrize("feature", ASKS)
def test_a_run_that_asks_for_what_is_missing_is_told_and_no_other(feature, monkeypatch):
    changes, asked, allowed = ASKS[feature]
    monkeypatch.setattr("oar_plugin.hosts.verl.offload.faults", lambda config: [])
    monkeypatch.setattr(
        "oar_plugin.hosts.verl.capabilities.missing", lambda name: ["x: f takes (a)"] if name == feature else []
    )
    with pytest.raises(OarConfigError) as refused:
        resolve_here(config(**changes))
    text = str(refused.value)
    assert text.startswith(f"{asked}: not served on this verl ({verl.__version__})")
    assert "(x: f takes (a))" in text
    assert f"allowed: {allowed}" in text
    strategy = "megatron" if feature == "fsdp" else "fsdp"
    for other in set(ASKS) - {feature, "fsdp"}:
        assert resolve_here(config(**{"actor_rollout_ref__actor__strategy": strategy} | ASKS[other][0]))


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


def test_with_verls_own_trainer_in_place_the_estimator_says_what_is_missing(monkeypatch):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    monkeypatch.setattr(capabilities, "missing", lambda feature: ["x: f takes (a)"] if feature == "sync" else [])
    with pytest.raises(RuntimeError, match=r"x: f takes \(a\)"):
        get_adv_estimator_fn("oar")()


def test_only_a_reader_of_the_log_is_told_what_was_left_in_place(monkeypatch, caplog):
    monkeypatch.setattr(capabilities, "missing", lambda feature: ["x: f takes (a)"])
    with caplog.at_level(logging.INFO, logger="oar_plugin"):
        plugin._register_engines(sys)
    assert [(record.levelname, "x: f takes (a)" in record.message) for record in caplog.records] == [("INFO", True)]


def test_arguments_that_this_verl_does_not_take_are_left_out():
    assert accepted(lambda request_id: None, prompt_ids=[1]) == {}
    assert accepted(lambda request_id, **extra: None, prompt_ids=[1]) == {"prompt_ids": [1]}
    assert accepted(lambda server_id, request_id=None: None, request_id="a", other=1) == {"request_id": "a"}
