"""TRL's releases stand beside the environment (tests/run.sh): verl's patch of models cannot be imported where one is found."""

import importlib.metadata
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("trl") else ["*.py"]


class PlainLogProbs:
    """What TRL 1.15's Triton kernel computes, fast without a GPU; `worker.py` runs the kernel itself."""

    @staticmethod
    def apply(hidden, weight, bias, target, temperature, *_):
        log_p = (hidden @ weight.T).float().div(temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, target[:, None])[:, 0], entropy, None, None, None


@pytest.fixture(autouse=True, scope="session")
def _log_probs():
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("trl") and importlib.metadata.version("trl").startswith("1.15."):
            patch.setattr("trl.trainer.utils._ChunkedLogProbFunction", PlainLogProbs)
        yield
