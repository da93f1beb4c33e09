import pytest
import torch

from benchmarks.step.measure import Settings, build_candidates

TINY = Settings(size="tiny", responses=3, response_length=48, prompt_length=8, answer_length=4, micro_batch=2, rounds=2)


@pytest.fixture(scope="session")
def tiny() -> Settings:
    return TINY


@pytest.fixture
def passes():
    return build_candidates(TINY, torch.device("cpu"))[0]
