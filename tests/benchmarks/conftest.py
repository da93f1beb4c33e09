import pytest
import torch

from benchmarks.step.passes import Passes
from benchmarks.step.study import Settings, build_passes

TINY = Settings(size="tiny", responses=3, response_length=48, prompt_length=8, answer_length=4, micro_batch=2)


@pytest.fixture
def passes() -> Passes:
    return build_passes(TINY, torch.device("cpu"))
