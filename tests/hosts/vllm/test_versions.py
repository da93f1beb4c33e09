"""What is said of a vLLM: read from the sources of the installed one, and of the same with something changed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from oar_plugin.hosts.vllm import versions
from oar_plugin.hosts.vllm.versions import TRIED, USES, installed, missing, unsupported, untried
from tests.limits import PROCESS_S

pytest.importorskip("vllm")

RUNNER = "v1/worker/gpu_model_runner.py"
HOOKED = "_get_prompt_logprobs_dict"


@pytest.fixture
def sources(tmp_path) -> Path:
    """A copy of the installed sources that are looked at."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for file in {file for file, _ in USES}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((Path(spec.origin).parent / file).read_text())
    return tmp_path


def test_the_installed_vllm_has_what_is_needed():
    assert unsupported(installed()) is None


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (RUNNER, f"def {HOOKED}(", "def elsewhere(", rf"{RUNNER}: GPUModelRunner has no {HOOKED}\(hidden_states, num_sch"),
        (RUNNER, "hidden_states: torch.Tensor,\n        num_scheduled_tokens: dict", "num_scheduled_tokens: dict",
         rf"{HOOKED}\(num_scheduled_tokens\) in place of {HOOKED}\(hidden_states, num_scheduled_tokens\)"),
        (RUNNER, "self.query_start_loc", "self.starts", "GPUModelRunner has no query_start_loc"),
        (RUNNER, "class GPUModelRunner", "class Runner", "has no class GPUModelRunner"),
        ("sampling_params.py", "skip_reading_prefix_cache", "skip", "SamplingParams has no skip_reading_prefix_cache"),
        ("inputs/llm.py", "cache_salt", "salt", "TokensPrompt has no cache_salt"),
        ("v1/engine/async_llm.py", "priority: int", "rank: int", r"in place of generate\(.*priority=\)"),
        ("v1/worker/gpu/sample/prompt_logprob.py", "self.uses_prompt_logprobs", "self.uses", "no uses_prompt_logprobs"),
        ("v1/worker/gpu/states.py", "", None, "there is no v1/worker/gpu/states.py"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_what_was_found(sources, file, old, new, said):
    if new is None:
        (sources / file).unlink()
    else:
        (sources / file).write_text((sources / file).read_text().replace(old, new))
    with pytest.raises(ValueError, match=said):
        raise ValueError("; ".join(missing(sources)))


def test_a_fault_says_which_vllm_it_is_of(monkeypatch):
    monkeypatch.setattr(versions, "missing", lambda package: iter(["a", "b"]))
    assert unsupported("0.99") == "vLLM 0.99 lacks what scoring on the rollout engine needs: a; b"
    assert unsupported(None) == "vLLM is not installed"


def test_versions_outside_of_those_tried_are_noted():
    assert [untried(f"{version}.3+cpu") for version in TRIED] == [None, None]
    for version in ("0.23.0", "0.99.0", "1.0"):
        assert f"vLLM {version}: " in (untried(version) or "")


def test_vllm_is_not_imported():
    """Drivers ask, and trainers import the package, where no engine is."""
    modules = "extension, request, scorer, tags, throttle, versions"
    script = f"""
import sys
from oar_plugin.hosts.vllm import {modules}
versions.unsupported(versions.installed())
assert "vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROCESS_S)
