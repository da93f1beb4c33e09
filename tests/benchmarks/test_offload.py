"""The candidates of masked copies compute the same, and the whole study on an engine."""

import json

import psutil
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.offload import study
from benchmarks.offload.passes import Passes
from benchmarks.offload.scoring import InTorch, made_responses
from benchmarks.workload import Workload
from oar_plugin.config import OarConfig
from oar_plugin.passes.request import Request

SMALL = ["offload", "--size=1m", "--responses=2", "--prompt-length=8", "--answer-length=2", "--threads=1"]
SMALL += ["--response-length=40"]


@pytest.fixture
def passes():
    tiny = Workload(size="tiny", responses=3, prompt_length=8, answer_length=4)
    return Passes(tiny.model(56), tiny.batch(48), Request.of_step(OarConfig(), 1), micro_batch=2)


def test_published_and_ours_agree_whatever_the_batch(passes):
    responses = made_responses(passes)
    ours = InTorch(passes, 0, 1).score(responses, None)
    for at_once in (1, 5, 1000):
        theirs = InTorch(passes, 0, at_once).score(responses, None, published=True)
        for a, b in zip(theirs.importance, ours.importance, strict=True):
            assert b.max() > 0
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * b.max().item())
        assert theirs.copies == ours.copies == sum(sum(r.reasoning) for r in responses)
        assert theirs.tokens == sum((1 + sum(r.reasoning)) * len(r.candidate.token_T) for r in responses)
        assert sum(len(r.candidate.token_T) for r in responses) < ours.tokens < theirs.tokens
    hybrid = InTorch(passes, 0, 1).score(responses, None, hybrid=True)
    assert 0.3 <= hybrid.copies / ours.copies < 0.35


@pytest.mark.slow
def test_whole_study_on_an_engine(tmp_path):
    pytest.importorskip("vllm")
    before = set(psutil.Process().children(recursive=True))
    assert main([*SMALL, "--rounds", "2", "--out", str(tmp_path)]) == 0
    left = [p for p in psutil.Process().children(recursive=True) if p not in before and p.status() != "zombie"]
    assert not [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]
    content = json.loads((tmp_path / "perturbation_cpu_1m_40.json").read_text())
    runs = content["runs"]["runs"]
    assert set(content["runs"]["seconds"]) == set(study.TITLES)
    copies = {letter: [run["copies"] for run in each] for letter, each in runs.items()}
    assert copies["o"] == copies["l"] == copies["p"]
    assert copies["t0"] == [0, 0]
    assert min(copies["t100"]) > 0
    assert set(content["runs"]["disagreement"]) == {"p", "o"}, "the engine was compared before anything was timed"
