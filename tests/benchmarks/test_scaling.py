"""The scaling study: series, figures of files, a projection, and one run over two processes."""

import itertools
import json

import numpy as np
import pytest
import torch

import oar_plugin
from benchmarks.report import silent
from benchmarks.scaling import study
from benchmarks.scaling.layouts import Launch, Layout
from benchmarks.scaling.study import Settings, measure
from benchmarks.tiny.model import SHAPES
from benchmarks.tiny.words import make_tokenizer
from tests.limits import PROCESS_S

MACHINE = {"device": "cpu", "cores": 2, "nodes": 1, "backend": "gloo", "load_average_before": [1, 1, 1]}


def write_result(runs, launch, importance):
    """GRPO takes 4 s, OAR so many seconds more; rounds drift by a little, both methods alike, and one is bad."""
    drift = np.array([1.0, 1.01, 1.02, 3.0, 1.03])
    grpo = {"log_prob": list(drift), "update": list(3 * drift)}
    oar = {"log_prob": list((1 + importance) * drift), "driver": list(0 * drift), "update": list(3 * drift)}
    seconds = {"grpo": grpo, "oar": oar}
    measured = {"seconds": seconds, "cpu_seconds": seconds, "machine": MACHINE, "scores": [1.0, 0.5]}
    launch.file(runs).write_text(json.dumps(launch.told() | measured | {"parameters": 7_000_000}))


def test_ratios_over_the_first_layout_verdicts_and_what_is_missing(tmp_path):
    """data on 1, 2, 4 processes, where the ratio is 1.25, 1.25 and 1.5; tensor on 1 and 4, and nothing of 2."""
    settings = Settings(launcher="none", runs=tmp_path, responses=4, parallel=("data", "tensor"))
    series = settings.series()
    assert [x.work.responses for x in series["data, weak"]] == [4, 8, 16], "the batch grows with the processes"
    assert [x.work.responses for x in series["data, strong"] + series["tensor"]] == [4] * 6
    for launch in itertools.chain(*series.values()):
        assert Layout.parse(str(launch.layout)) == launch.layout
        if launch.layout != Layout("megatron", tensor=2):
            write_result(tmp_path, launch, 2.0 if launch.layout.data == 4 else 1.0)
    report = measure(settings)
    rows = {tuple(row[:2]): row[2:] for row in report.tables[0].rows}
    assert rows["data, strong", "fsdp"] == ["4", "4.08", "5.1", "1.250", "1.25 .. 1.25", "1.250", "", ""]
    assert (rows["data, weak", "fsdp:data=2"][-1], rows["tensor", "megatron:tensor=4*"][-1]) == ("reached",) * 2
    assert rows["data, weak", "fsdp:data=4*"][-1] == "NOT reached", "the star: four processes on two cores"
    missing = "no result: megatron_tensor2_4.json is not there"
    assert report.tables[2].rows == [("megatron:tensor=2, 4 responses", missing)]
    assert report.failed


def test_projected_weak_grows_the_batch_with_the_gpus_and_strong_shrinks_the_time(monkeypatch):
    pytest.importorskip("verl")
    from benchmarks.scaling import projection

    monkeypatch.setattr(projection, "SIZES", (64, 128))
    report = projection.measure(["qwen2_5_32b_megatron"], silent)
    weak_64, weak_128, strong_64, strong_128 = report.runs["recipes"]["qwen2_5_32b_megatron"]
    assert (weak_128["sequences"], strong_128["sequences"]) == (2 * weak_64["sequences"], strong_64["sequences"])
    assert weak_128["seconds"]["update"] == pytest.approx(weak_64["seconds"]["update"], rel=0.05)
    assert strong_128["seconds"]["update"] < 0.75 * strong_64["seconds"]["update"]


@pytest.mark.slow
def test_two_engines_over_two_processes(tmp_path):
    """Real torchrun, verl's real engines; what was timed is importance, as the plain pass of one process has it."""
    pytest.importorskip("mbridge")
    settings = Settings(
        size="tiny", responses=4, prompt_length=8, response_length=40, answer_length=2, scored_share=0.5, rounds=2,
        parallel=("tensor",), processes=(2,), layout=("fsdp:data=2",), runs=tmp_path,
    )  # fmt: skip
    report = measure(settings)
    tokenizer = make_tokenizer(SHAPES["tiny"].vocab, by_bytes=True)
    ids = settings.token_BL(tokenizer)[0].tolist()
    rows = {"prompts": [ids[:8]], "responses": [ids[8:]], "importance": settings.importance}
    door = oar_plugin.importance(settings.make_model(), tokenizer=tokenizer, **rows)
    want = door.importance[0, 8:]
    assert [launch["layout"] for launch in report.runs["launches"]] == ["fsdp:data=2", "megatron:tensor=2"]
    for launch in report.runs["launches"]:
        assert (torch.tensor(launch["scores"]) - want).abs().max() < 1e-4 * want.max()
    alone = Launch(Layout("megatron", tensor=2), settings).argument(tmp_path)
    with pytest.raises(RuntimeError, match=r"^ValueError: .* takes 2 processes, and 1 were started$"):
        study.torchrun(1, alone, PROCESS_S)  # the reason is the worker's own line
