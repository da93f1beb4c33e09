"""The hook into vLLM's model runners, without vLLM; `test_engine_scoring` has the real one."""

import pytest

from oar_plugin.hosts.vllm.extension import OutcomeExtension


def test_another_model_runner_is_refused_with_what_to_do():
    worker = OutcomeExtension()
    worker.model_runner = type("ThirdRunner", (), {})()
    with pytest.raises(RuntimeError, match=r"ThirdRunner.*_get_prompt_logprobs_dict.*backend=actor"):
        worker.oar_install()
