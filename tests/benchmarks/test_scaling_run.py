"""The whole command: real torchrun, verl's real FSDP and Megatron engines in two processes each."""

import argparse
import json
import time

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")

from benchmarks.scaling.launch import torchrun
from benchmarks.step.passes import Passes
from benchmarks.tiny.random_models import SHAPES, build_batch, build_model
from oar_plugin.cli import bench
from oar_plugin.config import OarConfig
from oar_plugin.passes.request import Request

pytestmark = pytest.mark.slow

RESPONSES, PROMPT, RESPONSE, ANSWER = 4, 8, 40, 2


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("out")
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    lengths = ["--prompt-length", str(PROMPT), "--response-length", str(RESPONSE), "--answer-length", str(ANSWER)]
    batch = ["--responses", str(RESPONSES), *lengths, "--rounds", "2", "--scored-share", "0.5"]
    kinds = ["--parallel", "data", "tensor", "--mode", "strong", "--processes", "2", "--layout", "megatron:pipeline=3"]
    # The limit of a launch, which takes half a minute, is against a hang only.
    arguments = ["scaling", "--size", "tiny", *batch, *kinds, "--timeout", "600", "--out", str(out)]
    assert bench.run(parser.parse_args(arguments)) == 1  # one layout does not fit
    return json.loads((out / "scaling_cpu.json").read_text())


def test_both_engines_are_measured_and_the_layout_that_does_not_fit_is_named(content):
    assert [launch["layout"] for launch in content["launches"]] == ["fsdp:data=2", "megatron:tensor=2"]
    assert [failed["layout"] for failed in content["failed"]] == ["megatron:pipeline=3"]
    for launch in content["launches"]:
        assert launch["seconds"].keys() == {"grpo", "oar"}
        assert launch["seconds"]["oar"].keys() == {"log_prob", "gate", "update"}
        for phases in launch["seconds"].values():
            assert all(len(values) == 2 and min(values) > 0 for values in phases.values())


def test_what_was_timed_is_importance(content):
    """Of the first response, against the plain single-process pass of `oar bench step`."""
    config = OarConfig.parse({})
    model = build_model("tiny", "qwen2", SHAPES["tiny"].vocab, PROMPT + RESPONSE, torch.float32, torch.device("cpu"), 0)
    batch = build_batch(RESPONSES, PROMPT, RESPONSE, ANSWER, RESPONSES // 2, torch.device("cpu"), 0)
    want = Passes(model, batch, Request.from_config(config, 1, RESPONSE), 2).fused().importance[0][0, PROMPT:]
    for launch in content["launches"]:
        assert (torch.tensor(launch["scores"]) - want).abs().max() < 1e-4 * want.max()


def test_a_launch_that_takes_too_long_is_ended():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done after 0\.5 s"):
        torchrun(2, ["--help"], 0.5)
    assert time.monotonic() - started < 15
