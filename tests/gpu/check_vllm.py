"""Scoring on vLLM engines on GPUs: the tests of tests/hosts/vllm, with CUDA graphs and asynchronous scheduling, and in bf16.

Both model runners, the second one with real Triton kernels. On a CPU the engine has no graphs.
"""

import json

import pytest

from tests.gpu import here

FILE = "tests/hosts/vllm/test_engine_scoring.py"
EAGER = {"enforce_eager": True, "async_scheduling": False}
GRAPHS = {"enforce_eager": here.REHEARSAL, "async_scheduling": True}
FLOAT32, HALF = 1e-3, 0.5
LIMIT_S = 1500


def engine(name, settings, which, tolerance=FLOAT32, gpus=1):
    return pytest.param(settings, which, tolerance, id=name, marks=pytest.mark.needs(gpus=gpus, packages=("vllm",)))


@pytest.mark.parametrize(
    ("settings", "which", "tolerance"),
    [
        engine("eager", EAGER, "OneRank"),
        engine("graphs", GRAPHS, "OneRank"),
        engine("graphs, second runner", GRAPHS, "SecondRunner"),
        engine("graphs, bf16", GRAPHS | {"dtype": "bfloat16"}, "(OneRank or SecondRunner) and scores_are", HALF),
        engine("graphs, two ranks", GRAPHS, "TwoRanks", gpus=2),
    ],
)
def test_scores_equal_single_copies_of_a_plain_model(suite, figures, settings, which, tolerance):
    environment = {"OAR_TEST_ENGINE": json.dumps(settings), "OAR_TEST_TOLERANCE": str(tolerance)}
    count = suite([FILE, "-k", which], LIMIT_S, VLLM_WORKER_MULTIPROC_METHOD="spawn", **environment)
    for name, number in count.items():
        figures(name, number)
    assert count["tests"] > count["skipped"]
