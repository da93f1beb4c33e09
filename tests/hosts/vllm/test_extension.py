"""The hook into vLLM's model runners, without vLLM; `test_engine_scoring` has the real one."""

from types import SimpleNamespace

import pytest

from oar_plugin.hosts.vllm.extension import OutcomeExtension


def worker(runner: object) -> OutcomeExtension:
    made = OutcomeExtension()
    made.model_runner = runner
    return made


def test_another_model_runner_is_refused_with_what_to_do():
    with pytest.raises(RuntimeError, match=r"ThirdRunner.*_get_prompt_logprobs_dict.*backend=actor"):
        worker(type("ThirdRunner", (), {})()).oar_install()


def test_installing_twice_wraps_once():
    runner = SimpleNamespace(_get_prompt_logprobs_dict=lambda: None, get_model=lambda: None)
    worker(runner).oar_install()
    installed = dict(vars(runner))
    worker(runner).oar_install()
    assert vars(runner) == installed
