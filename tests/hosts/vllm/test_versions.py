"""What is said of a vLLM, by what it lacks and by its version."""

import pytest

from oar_plugin.hosts.required_api import Requirements
from oar_plugin.hosts.vllm import versions
from oar_plugin.hosts.vllm.versions import TRIED, installed, unsupported, untried

pytest.importorskip("vllm")


def test_a_fault_says_which_vllm_it_is_of(monkeypatch):
    assert unsupported(installed()) is None
    monkeypatch.setattr(versions, "requirements", lambda feature: Requirements(faults=["a", "b"]))
    assert unsupported("0.99") == "vLLM 0.99 lacks what scoring on the rollout engine needs: a; b"
    assert unsupported(None) == "vLLM is not installed"


def test_versions_outside_of_those_tried_are_noted():
    assert [untried(f"{version}.3+cpu") for version in TRIED] == [None, None]
    for version in ("0.23.0", "0.99.0", "1.0"):
        assert f"vLLM {version}: " in (untried(version) or "")
