"""The hook into vLLM's model runner, without vLLM; `test_engine_scoring` has the real one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from oar_plugin.hosts.vllm.extension import OutcomeExtension
from tests.limits import PROCESS_S


def worker(runner: object) -> OutcomeExtension:
    made = OutcomeExtension()
    made.model_runner = runner
    return made


def test_another_model_runner_is_refused_with_what_to_do():
    with pytest.raises(RuntimeError, match=r"SecondRunner.*VLLM_USE_V2_MODEL_RUNNER=0.*backend=actor"):
        worker(type("SecondRunner", (), {})()).oar_install()


def test_installing_twice_wraps_once():
    runner = SimpleNamespace(_get_prompt_logprobs_dict=lambda: None, get_model=lambda: None)
    worker(runner).oar_install()
    installed = dict(vars(runner))
    worker(runner).oar_install()
    assert vars(runner) == installed


def test_vllm_is_not_imported():
    """Drivers and trainers import the package where no engine is."""
    modules = ", ".join(f"oar_plugin.hosts.vllm.{name}" for name in ("extension", "scorer", "throttle", "versions"))
    script = f"import sys, {modules}\nassert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROCESS_S)
