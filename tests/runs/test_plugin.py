"""The old module names of recipes and runs, in a process that imports them first."""

import importlib.metadata
import subprocess
import sys

import pytest

pytest.importorskip("verl")

from oar_plugin.runs.plugin import MOVED, load, with_new_names
from tests.limits import PROCESS_S

NEW_NAMES = """
import importlib, sys
import oar_plugin.runs.plugin
early = set(sys.modules)
for name in ("hydra", "omegaconf", "torch", "verl", "yaml"):
    assert name not in early, name
from hydra.utils import get_class
keep_run = get_class("oar_plugin.hosts.verl.hydra_conf.KeepRun")
for old, new in oar_plugin.runs.plugin.MOVED.items():
    module, spec = importlib.import_module(old), importlib.util.find_spec(new)
    assert module is importlib.import_module(new) is sys.modules[old]
    assert (module.__name__, module.__spec__) == (new, spec)
from oar_plugin.hosts.verl.best_checkpoint import KeepBest
from oar_plugin.runs import best_checkpoint, run_folder
assert (keep_run, KeepBest) == (run_folder.KeepRun, best_checkpoint.KeepBest)
from oar_plugin.hosts.verl import hydra_conf
assert not hasattr(hydra_conf, "KeepRuns")
from verl.utils.import_utils import load_class_from_fqn, load_extern_object
assert load_class_from_fqn("oar_plugin.hosts.verl.best_checkpoint.KeepBest", "callback") is KeepBest
assert load_extern_object("pkg://oar_plugin.hosts.verl.reward", "compute_score").__module__ == "oar_plugin.runs.reward"
"""


def test_old_names_are_the_modules_of_today_and_are_imported_only_when_asked_for():
    done = subprocess.run([sys.executable, "-c", NEW_NAMES], capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 0, done.stderr


def test_a_failure_is_told_and_ends_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setitem(sys.modules, "wrapt", None)
    load()
    assert "ModuleNotFoundError" in capsys.readouterr().err


def test_settings_have_the_new_names():
    assert [with_new_names(f"pkg://{old}") for old in MOVED] == [f"pkg://{new}" for new in MOVED.values()]
    others = ["oar_plugin.hosts.verl.hydra_conf.CheckAtStart", 1]
    assert with_new_names(others) == others


def test_verl_loads_it():
    entries = importlib.metadata.entry_points(group="verl.plugins", name="oar_runs")
    assert {entry.value for entry in entries} == {"oar_plugin.runs.plugin"}
