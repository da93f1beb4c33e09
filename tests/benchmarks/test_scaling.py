"""Layouts, their batches, what becomes of a launch that fails, the figures, and one run over two processes."""

import csv
import io
import itertools
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.scaling import launch as launching
from benchmarks.scaling.layouts import Launch, Layout, Work, plan_series
from benchmarks.scaling.study import Settings, measure
from benchmarks.tiny.random_models import SHAPES, build_batch, build_model

SMALL = Work(size="1m")  # 4 layers, 4 heads, 2 key-value heads
MACHINE = {
    "device": "cpu",
    "accelerator": None,
    "cpu": "x",
    "cores": 2,
    "nodes": 1,
    "backend": "gloo",
    "torch_threads": 1,
}
MACHINE |= {
    "torch": "2",
    "transformers": "5",
    "python": "3",
    "load_average_before": [1, 1, 1],
    "load_average_after": None,
}


def write_result(runs: Path, launch: Launch, work: Work, importance=1.0, slow=1.0, first_score=0.5) -> None:
    """GRPO takes 4 s times `slow`, OAR so many seconds more; rounds drift by a little, both methods alike, and one is bad."""
    drift = slow * np.array([1.0, 1.01, 1.02, 3.0, 1.03])
    grpo = {"log_prob": list(drift), "update": list(3 * drift)}
    oar = {"log_prob": list((1 + importance) * drift), "gate": list(0 * drift), "update": list(3 * drift)}
    seconds = {"grpo": grpo, "oar": oar}
    found = {"seconds": seconds, "cpu_seconds": seconds, "machine": MACHINE, "scores": [1.0, first_score]}
    told = {name: value for name, value in vars(work).items() if name in asdict(Work())}
    launch.file(runs).write_text(json.dumps({**told, "responses": launch.responses, **found, "parameters": 7_000_000}))


def test_a_layout_and_its_text():
    for text, processes in {"fsdp": 1, "fsdp:data=4,sequence=2": 8, "megatron:data=3,tensor=2,pipeline=5": 30}.items():
        assert str(Layout.parse(text)) == text
        assert Layout.parse(text).processes == processes


@pytest.mark.parametrize(
    ("layout", "responses", "says"),
    [
        ("fsdp:data=3", 16, "16 responses"),
        ("megatron:data=2", 6, "not a multiple of --micro-batch 2"),
        ("megatron:tensor=8", 16, "4 attention heads"),
        ("fsdp:sequence=3", 15, "4 attention heads"),
        ("megatron:pipeline=3", 16, "4 layers"),
        ("megatron:data=2,pipeline=4,tensor=4", 16, None),
        ("fsdp:sequence=4", 16, None),
        ("megatron", 1, None),  # one micro-batch holds them all
    ],
)
def test_a_layout_that_does_not_fit_says_why(layout, responses, says):
    problem = Launch(Layout.parse(layout), responses).problem(SMALL)
    assert problem is None if says is None else says in problem


def test_only_data_parallelism_has_two_modes_and_weak_grows_the_batch():
    given = [Layout.parse("megatron:tensor=8"), Layout.parse("megatron:tensor=8,data=8")]
    series = plan_series(8, ["data", "tensor"], ["weak", "strong"], [4, 1, 2, 2], given)
    shown = {name: [(launch.layout.processes, launch.responses) for launch in each] for name, each in series.items()}
    assert shown == {
        "data, weak": [(1, 8), (2, 16), (4, 32)],
        "data, strong": [(1, 8), (2, 8), (4, 8)],
        "tensor": [(1, 8), (2, 8), (4, 8)],
        "layouts, weak": [(8, 8), (64, 64)],
        "layouts, strong": [(8, 8), (64, 8)],
    }


def test_the_worker_is_told_everything_and_the_batch_of_the_launch(tmp_path):
    settings = Settings(size="1m", responses=4, checkpointing=True, scored_share=0.5, timeout=3.0, processes=(1,))
    told = json.loads(Launch(Layout("fsdp", data=2), 8).argument(settings, tmp_path))
    assert (told.pop("layout"), told.pop("runs")) == ("fsdp:data=2", str(tmp_path))
    assert Work(**told) == Work(size="1m", responses=8, checkpointing=True, scored_share=0.5)


def test_a_result_of_other_arguments_or_of_another_kind_is_not_taken(tmp_path):
    launch = Launch(Layout("fsdp"), 8)
    write_result(tmp_path, launch, Work(size="1m", rounds=3))
    assert launch.result(Work(size="1m", responses=3), tmp_path)["scores"] == [1.0, 0.5], "rounds may differ"
    with pytest.raises(RuntimeError, match=r"other arguments: size$"):
        launch.result(Work(size="tiny"), tmp_path)
    for content in ("", "{}", "[]"):
        launch.file(tmp_path).write_text(content)
        with pytest.raises(RuntimeError, match="not a result of"):
            launch.result(Work(), tmp_path)


def test_an_old_file_is_not_taken_for_the_result_of_a_launch_that_fails(tmp_path, monkeypatch):
    launch = Launch(Layout("fsdp"), 8)
    write_result(tmp_path, launch, Work())
    monkeypatch.setattr(launching, "torchrun", lambda *_: None)
    with pytest.raises(RuntimeError, match="no result"):
        launching.run_launch(launch, Work(), tmp_path, 1.0)
    monkeypatch.setattr(launching, "torchrun", lambda *_: pytest.fail("started, and does not fit"))
    with pytest.raises(RuntimeError, match="4 layers"):
        launching.run_launch(Launch(Layout("megatron", pipeline=3), 8), Work(), tmp_path, 1.0)


def test_the_reason_is_the_workers_own_line_or_the_end_of_the_log():
    log = f"warning\n[rank1] {launching.FAILED} ValueError: too big\nTraceback\n{launching.FAILED} other"
    assert launching.reason_in(log, 1) == "ValueError: too big"
    assert launching.reason_in("x " * 1000 + "Killed", 137).endswith("Killed")
    assert launching.reason_in("", 137).startswith("exit status 137")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--responses", "0"], "--responses 0: must be at least 1"),
        (["--scored-share", "2"], "--scored-share 2.0: must be in (0, 1]"),
        (["--size", "2b"], "--size 2b: allowed: tiny,"),
        (["--importance", "oar_p"], "--importance oar_p: it runs masked copies"),
        (["--layout", "ddp"], "--layout ddp: allowed are fsdp:data=N,sequence=N and megatron"),
        (["--layout", "fsdp:tensor=2"], "--layout fsdp:tensor=2: allowed are"),
        (["--layout", "fsdp:data=0"], "--layout fsdp:data=0: allowed are"),
        (["--layout", "fsdp:data"], "--layout fsdp:data: allowed are"),
        (["--model", "/nowhere"], "--model /nowhere: must be a folder"),
        (["--launcher", "none"], "--launcher none: needs --runs"),
        (["--processes", "0"], "--processes 0: must be at least 1"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments, says, capsys):
    assert main(["scaling", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_print_says_what_to_start_on_every_node(capsys):
    arguments = ["--layout", "megatron:data=2,tensor=8", "--dtype", "bfloat16", "--responses", "4"]
    assert main(["scaling", "--launcher", "print", *arguments]) == 0
    first, second, *_ = capsys.readouterr().out.strip().splitlines()
    assert first == "# 16 processes"
    assert "-m benchmarks.scaling.worker '{" in second
    assert '"responses": 4, "dtype": "bfloat16", "layout": "megatron:data=2,tensor=8"' in second


@pytest.fixture
def settings(tmp_path) -> Settings:
    """data, weak, on 1, 2, 4 processes, where the ratio is 1.25, 1.25 and 1.5; tensor on 1 and 4, and nothing of 2."""
    settings = Settings(launcher="none", runs=tmp_path, responses=4, mode=("weak",), parallel=("data", "tensor"))
    for launch in itertools.chain(*settings.series().values()):
        if launch.layout != Layout("megatron", tensor=2):
            importance = 2.0 if launch.layout == Layout("fsdp", data=4) else 1.0
            write_result(tmp_path, launch, settings, importance, slow=launch.layout.processes)
    return settings


def test_medians_ratios_and_efficiencies(settings):
    report = measure(settings)
    rows = {(row["series"], row["processes"]): row for row in csv.DictReader(io.StringIO(report.extra["csv"]))}
    one, two, four = (rows["data, weak", size] for size in "124")
    assert [float(row["ratio"]) for row in (one, two, four)] == [1.25, 1.25, 1.5], "one bad round moves no ratio"
    assert float(two["grpo_seconds"]) == pytest.approx(2 * 4 * 1.02)
    assert float(four["oar_log_prob_seconds"]) == pytest.approx(4 * 3 * 1.02)
    assert float(two["grpo_efficiency"]) == 0.5, "weak: as much time would be ideal, and it took twice as long"
    assert float(four["oar_efficiency"]) == pytest.approx(0.25 * 1.25 / 1.5, rel=1e-5)
    assert float(rows["tensor", "4"]["grpo_efficiency"]) == 1 / 16, "four processes, four times as long for one batch"
    assert (one["processes_a_core"], four["processes_a_core"]) == ("0.5", "2")


def test_verdicts_and_what_is_missing_are_reported(settings):
    report = measure(settings)
    assert report.failed
    assert {row[0]: row[-1] for row in report.tables[0].rows} == {
        "data, weak: 2 against 1": "reached",
        "data, weak: 4 against 1": "NOT reached",
        "tensor: 4 against 1": "reached",
    }
    assert "| megatron:tensor=2 | 4 | no result: megatron_tensor2_4.json is not there |" in report.markdown(None)
    assert "| megatron:tensor=4* | 4 |" in report.markdown(None)
    assert "PROCESSES SHARE CORES" in report.notes[-1]
    assert len(report.runs["launches"]) == 5
    assert any("OAR's over GRPO's was 1.000" in note for note in report.notes)
    assert any("at most 0 of its largest score" in note for note in report.notes)
    write_result(settings.runs, Launch(Layout("fsdp", data=2), 8), settings, first_score=0.4)
    assert any("at most 0.1 of its largest score" in note for note in measure(settings).notes)


def test_without_the_first_layout_there_is_neither_efficiency_nor_verdict(settings):
    Launch(Layout("fsdp"), 4).file(settings.runs).unlink()
    report = measure(settings)
    assert [row[0] for row in report.tables[0].rows] == ["tensor: 4 against 1"]
    rows = list(csv.DictReader(io.StringIO(report.extra["csv"])))
    assert [row["oar_efficiency"] for row in rows if row["series"] == "data, weak"] == ["", ""]


def test_a_report_with_a_gap_is_written_and_ends_with_status_1(settings, tmp_path, capsys):
    arguments = ["--launcher", "none", "--runs", str(tmp_path), "--responses", "4", "--mode", "weak"]
    assert main(["scaling", *arguments, "--parallel", "data", "tensor", "--out", str(tmp_path / "out")]) == 1
    assert "megatron_tensor2_4.json is not there" in " ".join(capsys.readouterr().out.split())
    written = {path.suffix for path in (tmp_path / "out").glob("scaling_cpu.*")}
    assert written == {".csv", ".json", ".md", ".png"}
    assert main(["scaling", *arguments, "--layout", "fsdp:sequence=2"]) == 1
    assert "nothing was measured" in capsys.readouterr().err


@pytest.mark.slow
def test_two_engines_over_two_processes(tmp_path):
    """Real torchrun, verl's real engines; what was timed is importance, as the plain pass of one process has it."""
    pytest.importorskip("mbridge")
    from benchmarks.step.passes import Passes
    from oar_plugin.config import OarConfig
    from oar_plugin.passes.request import Request

    lengths = {"prompt_length": 8, "response_length": 40, "answer_length": 2}
    settings = Settings(
        size="tiny", responses=4, **lengths, scored_share=0.5, rounds=2, parallel=("data", "tensor"), mode=("strong",),
        processes=(2,), layout=("megatron:pipeline=3",), runs=tmp_path,
    )  # fmt: skip
    report = measure(settings)
    assert [launch["layout"] for launch in report.runs["launches"]] == ["fsdp:data=2", "megatron:tensor=2"]
    assert list(report.runs["failed"]) == ["megatron:pipeline=3, 4 responses"]
    assert report.markdown(None)
    model = build_model("tiny", "qwen2", SHAPES["tiny"].vocab, 48, torch.float32, torch.device("cpu"), 0)
    batch = build_batch(4, *lengths.values(), 2, torch.device("cpu"), 0)
    want = Passes(model, batch, Request.from_config(OarConfig.parse({}), 1, 40), 2).fused().importance[0][0, 8:]
    for launch in report.runs["launches"]:
        assert {method: set(phases) for method, phases in launch["seconds"].items()} == {
            "grpo": {"log_prob", "update"},
            "oar": {"log_prob", "gate", "update"},
        }
        for phases in launch["seconds"].values():
            assert all(len(values) == 2 and min(values) > 0 for values in phases.values())
        assert (torch.tensor(launch["scores"]) - want).abs().max() < 1e-4 * want.max()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done after 0\.5 s"):
        launching.torchrun(2, "{}", 0.5)
    assert time.monotonic() - started < 15
