"""The hook into vLLM's model runner, without vLLM; `test_engine_scoring` has the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oar_plugin.hosts.vllm.extension import OutcomeExtension
from tests.limits import PROCESS_S


class Worker(OutcomeExtension):
    def __init__(self, runner: object) -> None:
        self.model_runner = runner


def test_another_model_runner_is_refused_with_what_to_do():
    class SecondRunner:
        pass

    with pytest.raises(RuntimeError, match=r"SecondRunner.*VLLM_USE_V2_MODEL_RUNNER=0.*backend=actor"):
        Worker(SecondRunner()).oar_install()


def test_installing_twice_wraps_once():
    class Runner:
        def _get_prompt_logprobs_dict(self):
            pass

        def get_model(self):
            return self

    runner = Runner()
    Worker(runner).oar_install()
    wrapped, recorder = runner._get_prompt_logprobs_dict, runner.oar_recorder
    Worker(runner).oar_install()
    assert runner._get_prompt_logprobs_dict is wrapped
    assert runner.oar_recorder is recorder


def test_vllm_is_not_imported():
    """Drivers and trainers import the package where no engine is."""
    modules = ", ".join(f"oar_plugin.hosts.vllm.{name}" for name in ("extension", "scorer", "throttle", "versions"))
    script = f"import sys, {modules}\nassert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROCESS_S)
