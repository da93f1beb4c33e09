"""The engines' tests' model, in this process."""

from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from tests.hosts.engine import world


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    world.make_model(path)
    return path


@pytest.fixture(scope="module")
def model(folder) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(folder).eval()
