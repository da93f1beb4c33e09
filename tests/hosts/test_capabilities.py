"""What is found of a host, and that a run which asks for what it lacks is told while others are not."""

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("verl")

import verl
from verl.trainer import main_ppo

from oar_plugin.config import OarConfigError
from oar_plugin.hosts.verl import capabilities, hydra_conf, plugin
from oar_plugin.hosts.verl.capabilities import FEATURES, TRAINERS, accepted, lacking, missing
from oar_plugin.hosts.verl.settings import resolve
from tests.hosts.test_settings import OFFLOAD, config
from tests.limits import PROCESS_S

NEEDS = {"megatron": "megatron.core", "offload": "vllm"}
OURS = {  # feature -> modules with a subclass or mixin of a host's class
    "sync": ["trainer.OarTrainerMixin"],
    "ray_trainer": ["ray_trainer.OarRayTrainer"],
    "fsdp": ["fsdp.OarFSDPMixin"],
    "megatron": ["megatron.OarMegatronMixin"],
    "offload": [
        "agent_loop.OarAgentLoopWorker", "rollout_server.OarVLLMHttpServer", "rollout_worker.OarColocateWorkerExtension",
    ],
}  # fmt: skip


def hooks_of(feature):
    """Host's module or class, name, and parameters of each hook, where the installed hosts have all of them."""
    pytest.importorskip(NEEDS.get(feature, "verl"))
    if faults := missing(feature):
        assert verl.__version__ in ("0.8.0", "0.9.0.dev")  # `neo` is the second one
        assert feature not in ("ray_trainer", "fsdp")
        pytest.skip("; ".join(faults))
    for place, hooks in FEATURES[feature].items():
        for name, parameters in re.findall(r"(\w+)\((.*?)\)", hooks):
            yield place, name, [one for one in parameters.split(", ") if one]


@pytest.mark.parametrize("feature", FEATURES)
def test_whatever_is_changed_in_a_host_is_named(feature, monkeypatch):
    for place, name, parameters in hooks_of(feature):
        with monkeypatch.context() as changed:
            changed.setattr(
                pkgutil.resolve_name(place), name, None if parameters == ["..."] else lambda self, renamed: None
            )
            (fault,) = (fault for hooks in FEATURES[feature].items() for fault in lacking(*hooks))
        assert fault == f"{place}.{name}({', '.join(parameters)})"


@pytest.mark.parametrize(("feature", "ours"), [(feature, name) for feature, names in OURS.items() for name in names])
def test_the_table_has_every_method_that_we_override_with_our_parameters(feature, ours):
    table = list(hooks_of(feature))
    ours = pkgutil.resolve_name(f"oar_plugin.hosts.verl.{ours}")
    methods = {n: f for cls in ours.__mro__ if cls.__module__.startswith("oar_plugin") for n, f in vars(cls).items()}
    overridden = 0
    for place in FEATURES[feature]:
        host = pkgutil.resolve_name(place)
        if not isinstance(host, type) or (feature == "offload" and not issubclass(ours, host)):
            continue
        host = host.__bases__[-1] if ours in host.__bases__ else host  # `RayPPOTrainer` has been replaced
        expected = {name: [one for one in parameters if one != "..."] for at, name, parameters in table if at == place}
        for method, function in methods.items():
            if inspect.isfunction(function) and hasattr(host, method) and method[:2] != "__" and method[:4] != "open":
                own = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
                assert own[: len(expected[method])] == expected[method], method
                overridden += 1
    assert overridden


def test_v1_trainers_that_the_program_does_not_start_are_missing(monkeypatch):
    """As on verl's branch `neo`, which has their code."""
    assert capabilities.host_version() == verl.__version__
    monkeypatch.delattr(main_ppo, "TaskRunnerV1", raising=False)
    for mode in TRAINERS:
        told = missing.__wrapped__(mode)  # `missing` remembers
        assert "verl.trainer.main_ppo.TaskRunnerV1(...)" in told
    assert missing("ray_trainer") == ()


HOST = """
class Machine:
    def step(self, a, b=1): ...
    parts = 3
"""


@pytest.mark.parametrize(
    ("place", "hook", "fault"),
    [
        (":Machine", "step(a, b)", None),
        (":Machine", "step(b, ...)", None),
        (":Machine", "parts(...)", None),
        (":Machine", "step(a)", "host_of_two:Machine.step(a)"),
        (":Machine", "step(a, c, ...)", "host_of_two:Machine.step(a, c, ...)"),
        (":Machine", "stop()", "host_of_two:Machine.stop()"),
        (":Gone", "step()", "host_of_two:Gone.step()"),
        ("", "Machine(...)", None),
        (".gone", "step()", "host_of_two.gone"),
        (".broken", "step()", None),  # for this process only, perhaps
        ("_is_absent", "step()", None),
    ],
)
def test_what_a_host_lacks_is_named(place, hook, fault, tmp_path, monkeypatch):
    (tmp_path / "host_of_two").mkdir()
    (tmp_path / "host_of_two" / "__init__.py").write_text(HOST)
    (tmp_path / "host_of_two" / "broken.py").write_text("raise OSError('libcuda.so.1')")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(lacking(f"host_of_two{place}", hook)) == ([fault] if fault else [])


@pytest.mark.parametrize("named", ["", "mine", f"mine,{capabilities.PLUGIN}"])
@pytest.mark.parametrize("looks_for_plugins", [True, False])
def test_a_verl_that_does_not_look_for_plugins_is_told_to_import_ours(looks_for_plugins, named, tmp_path, monkeypatch):
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "version").write_text("0.8.0")
    (tmp_path / "__init__.py").write_text('_(group="verl.plugins")' if looks_for_plugins else "")
    monkeypatch.setattr(capabilities, "host_folder", lambda: tmp_path)
    monkeypatch.setenv(capabilities.EXTERNAL_MODULES, named)
    told = capabilities.external_modules()
    value = f"{capabilities.PLUGIN},{named}".strip(",")
    if looks_for_plugins or capabilities.PLUGIN in named:
        assert told == {}
        return
    assert told == {capabilities.EXTERNAL_MODULES: value}
    with pytest.raises(OarConfigError, match=f"{capabilities.EXTERNAL_MODULES}={value} on every node"):
        resolve(config(), here=True)


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
    monkeypatch.setattr("oar_plugin.hosts.verl.settings.installed", lambda: "0.28.0")
    monkeypatch.setattr(capabilities, "missing", lambda name: ("x: f takes (a)",) if name == feature else ())
    with pytest.raises(OarConfigError) as refused:
        resolve(config(**changes), here=True)
    text = str(refused.value)
    assert text.startswith(f"{asked}: not supported on this verl ({verl.__version__})")
    assert "(x: f takes (a))" in text
    assert f"allowed: {allowed}" in text
    strategy = "megatron" if feature == "fsdp" else "fsdp"
    for other, others, *_ in ASKS:
        if other not in (feature, "fsdp"):
            assert resolve(config(**{"actor_rollout_ref__actor__strategy": strategy} | others), here=True)


DOCTORED = """
import verl
from oar_plugin.hosts.verl import capabilities
looked = capabilities.missing
capabilities.missing = lambda feature: ("f is gone",) if feature in ("separate_async", "fsdp") else looked(feature)
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.engine.base import EngineRegistry
print("FOUND", *(get_trainer_cls(mode).__name__ for mode in capabilities.TRAINERS))
print("FOUND", EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""


@pytest.mark.skipif(bool(missing("sync")), reason="without the trainers of trainer.v1")
def test_what_does_not_fit_stays_verls_own_and_no_process_says_a_word_about_it():
    command = [sys.executable, "-c", DOCTORED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=True)
    *trainers, engine = " ".join(line[6:] for line in done.stdout.splitlines() if line.startswith("FOUND ")).split()
    assert trainers == ["OarTrainerSync", "OarTrainerColocateAsync", "PPOTrainerSeparateAsync"]
    assert not engine.startswith("Oar")
    assert "oar_plugin" not in done.stderr
    assert "f is gone" not in done.stdout + done.stderr


def test_the_check_before_a_run_leaves_the_environment_as_it_was(monkeypatch):
    """Ray's workers inherit it, and vLLM sets variables when it is imported."""
    monkeypatch.setattr(hydra_conf, "resolve", lambda config, here: os.environ.update(OAR_TEST="set", PATH="changed"))
    monkeypatch.setattr(hydra_conf, "doubts", lambda *_: ())
    before = dict(os.environ)
    hydra_conf.CheckAtStart().on_run_start(config())
    assert dict(os.environ) == before


@pytest.mark.parametrize("lacks", [(), ("x: f takes (a)",)])
def test_outside_of_our_trainers_the_estimator_explains_itself_and_says_what_is_missing(lacks, monkeypatch):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    monkeypatch.setattr(capabilities, "missing", lambda feature: lacks if feature == "sync" else ())
    with pytest.raises(RuntimeError, match="outside of OAR's trainers") as raised:
        get_adv_estimator_fn("oar")()
    said = [line for line in str(raised.value).splitlines() if "f takes" in line]
    assert said == [f"this verl: {fault}" for fault in lacks]


def test_an_unforeseen_fault_leaves_verls_own_class_with_a_warning(monkeypatch, caplog):
    """The hooks run in every process of every run, where an exception would come out of verl's own import."""
    monkeypatch.setattr(capabilities, "missing", Mock(side_effect=OSError("a folder without a version file")))
    monkeypatch.delitem(sys.modules, "oar_plugin.hosts.verl.fsdp")
    with caplog.at_level("INFO", logger="oar_plugin"):
        plugin._register_engines(SimpleNamespace(__name__="verl.workers.engine"))
    assert "oar_plugin.hosts.verl.fsdp" not in sys.modules, "imported, and so registered, all the same"
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "a folder without a version file" in caplog.text


def test_arguments_that_this_verl_does_not_take_are_left_out():
    assert accepted(lambda request_id: None, prompt_ids=[1]) == {}
    assert accepted(lambda request_id, **extra: None, prompt_ids=[1]) == {"prompt_ids": [1]}
    assert accepted(lambda server_id, request_id=None: None, request_id="a", other=1) == {"request_id": "a"}
