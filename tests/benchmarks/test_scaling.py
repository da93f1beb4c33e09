"""Layouts, their batches, and what becomes of a launch that fails."""

import argparse
import dataclasses
import json

import pytest

from benchmarks.scaling.arguments import add_settings, settings_of, to_argv
from benchmarks.scaling.launch import find_result, reason_in, run_launch, worker_arguments
from benchmarks.scaling.measure import (
    Failed,
    Launch,
    Layout,
    Measured,
    ModelShape,
    Settings,
    distinct,
    launch_of,
    plan_series,
    read,
    write,
)
from oar_plugin.cli import bench

SMALL = ModelShape(layers=4, heads=4, key_value_heads=2)


def measured(launch: Launch) -> Measured:
    seconds = {"grpo": {"log_prob": [1.0], "update": [3.0]}, "oar": {"log_prob": [2.0], "gate": [0.5], "update": [3.0]}}
    return Measured(launch, seconds, seconds, {"device": "cpu"}, [0.5, 0.25], 7)


def parsed(arguments: list[str]) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return settings_of(parser.parse_args(arguments))


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="oar bench")
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["scaling", *arguments]))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("fsdp", Layout("fsdp")),
        ("fsdp:data=4,sequence=2", Layout("fsdp", data=4, sequence=2)),
        ("megatron:data=8,tensor=4,pipeline=2", Layout("megatron", data=8, tensor=4, pipeline=2)),
    ],
)
def test_a_layout_and_its_text(text, layout):
    assert Layout.parse(text) == layout
    assert str(layout) == text


@pytest.mark.parametrize(
    "text", ["", "ddp", "fsdp:tensor=2", "megatron:sequence=2", "fsdp:data=0", "fsdp:data", "fsdp:data=x"]
)
def test_a_layout_that_cannot_be_read_is_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match="allowed are fsdp:data=N,sequence=N and megatron"):
        Layout.parse(text)


def test_processes_are_the_product_of_the_sizes():
    assert Layout("megatron", data=3, tensor=2, pipeline=5, context=7).processes == 210


@pytest.mark.parametrize(
    ("layout", "responses", "says"),
    [
        (Layout("fsdp", data=3), 16, "16 responses"),
        (Layout("megatron", data=2), 6, "not a multiple of --micro-batch 2"),
        (Layout("megatron", tensor=8), 16, "4 attention heads"),
        (Layout("fsdp", sequence=3), 15, "4 attention heads"),
        (Layout("megatron", pipeline=3), 16, "4 layers"),
    ],
)
def test_a_layout_that_does_not_fit_says_why(layout, responses, says):
    assert says in layout.problem(SMALL, Settings(), responses)


def test_layouts_that_fit():
    for layout in (Layout("megatron", tensor=4), Layout("fsdp", sequence=4), Layout("megatron", data=2, pipeline=4)):
        assert layout.problem(SMALL, Settings(), 16) is None
    assert Layout("megatron").problem(SMALL, Settings(micro_batch=64), 16) is None, "one micro-batch holds them all"


def test_weak_grows_the_batch_and_strong_does_not():
    weak, strong = plan_series(Settings(responses=8), ["data"], ["weak", "strong"], [1, 2, 4])
    assert [x.responses for x in weak.launches] == [8, 16, 32]
    assert [x.responses for x in strong.launches] == [8, 8, 8]


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "sequence", "context"])
def test_what_shares_a_response_has_one_batch_and_one_series(kind):
    (series,) = plan_series(Settings(responses=8), [kind], ["weak", "strong"], [4, 1, 2, 2])
    assert [x.layout.processes for x in series.launches] == [1, 2, 4]
    assert {x.responses for x in series.launches} == {8}
    assert {getattr(x.layout, kind) for x in series.launches} == {1, 2, 4}


def test_launches_are_shared_by_series_and_made_once():
    series = plan_series(Settings(), ["data", "sequence", "tensor", "pipeline"], ["weak", "strong"], [1, 2])
    launches = distinct(series)
    assert len(launches) == 2 + 2 + 1 + 2  # one process an engine; data in two modes; Ulysses; tensor, pipeline
    assert [x.layout.processes for x in launches] == [1, 1, 2, 2, 2, 2, 2]
    assert len({x.name for x in launches}) == len(launches)


def test_given_layouts_are_a_series_of_their_own_held_against_the_first():
    layouts = [Layout("megatron", tensor=8), Layout("megatron", tensor=8, data=8)]
    (weak,) = plan_series(Settings(responses=4), [], ["weak"], [1], layouts)
    assert weak.base == Launch(layouts[0], 4)
    assert weak.launches[1] == Launch(layouts[1], 32)


def test_ideal_seconds():
    weak, strong = plan_series(Settings(responses=8), ["data"], ["weak", "strong"], [1, 4])
    assert weak.ideal_seconds(weak.launches[1], 10.0) == 10.0
    assert strong.ideal_seconds(strong.launches[1], 10.0) == 2.5


def test_settings_survive_the_way_to_the_worker():
    given = Settings(size="1m", responses=4, checkpointing=True, scored_share=0.5, vocab=9, model="/m")
    assert parsed(to_argv(given)) == given
    assert to_argv(Settings()) == []


def test_the_worker_gets_the_batch_of_the_launch(tmp_path):
    settings = Settings(responses=4)
    launch = launch_of(Layout("fsdp", data=2), settings, "weak")
    arguments = worker_arguments(launch, settings, tmp_path)
    assert arguments[arguments.index("--responses") + 1] == "8"
    assert arguments.count("--responses") == 1
    assert arguments[arguments.index("--mode") + 1] == "strong"


def test_a_result_file_is_read_back(tmp_path):
    launch = Launch(Layout("megatron", tensor=2), 8)
    write(tmp_path / f"{launch.name}.json", Settings(), measured(launch))
    assert find_result(launch, Settings(), tmp_path) == measured(launch)
    assert read(tmp_path / f"{launch.name}.json") == (Settings(), measured(launch))


def test_a_result_of_other_arguments_is_not_taken(tmp_path):
    launch = Launch(Layout("fsdp"), 8)
    write(tmp_path / f"{launch.name}.json", Settings(size="1m", responses=3, rounds=3), measured(launch))
    found = find_result(launch, Settings(), tmp_path)
    assert isinstance(found, Failed)
    assert found.reason.endswith("other arguments: size")


@pytest.mark.parametrize("content", ["", "{}", json.dumps({"settings": {"sizes": 1}})])
def test_something_else_in_place_of_a_result_is_a_failure(tmp_path, content):
    launch = Launch(Layout("fsdp"), 8)
    (tmp_path / f"{launch.name}.json").write_text(content)
    assert "not a result of" in find_result(launch, Settings(), tmp_path).reason


def test_a_launch_that_fails_is_a_result_and_an_old_file_is_not_taken_for_its_own(tmp_path):
    launch = Launch(Layout("fsdp"), 8)
    path = tmp_path / f"{launch.name}.json"
    write(path, Settings(), measured(launch))

    def broken(processes: int, arguments: list[str], timeout_s: float) -> None:
        raise RuntimeError("out of memory")

    assert run_launch(launch, Settings(), tmp_path, 1.0, broken) == Failed(launch, "out of memory")
    assert not path.exists()
    assert "no result" in run_launch(launch, Settings(), tmp_path, 1.0, lambda *_: None).reason


def test_a_layout_that_does_not_fit_is_not_started(tmp_path):
    def start(*_: object) -> None:
        raise AssertionError("started")

    failed = run_launch(Launch(Layout("megatron", pipeline=3), 8), Settings(), tmp_path, 1.0, start)
    assert "4 layers" in failed.reason


def test_the_reason_is_the_workers_own_line_or_the_end_of_the_log():
    log = "warning\n[rank1] oar bench scaling failed: ValueError: too big\nTraceback\noar bench scaling failed: other"
    assert reason_in(log, 1) == "ValueError: too big"
    assert reason_in("x " * 1000 + "Killed", 137).endswith("Killed")
    assert reason_in("", 137).startswith("exit status 137")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--responses", "0"], "--responses 0: must be at least 1"),
        (["--scored-share", "2"], "--scored-share 2.0: must be in (0, 1]"),
        (["--layout", "ddp"], "--layout ddp: allowed are"),
        (["--model", "/nowhere"], "--model /nowhere: no such folder"),
        (["--launcher", "none"], "--launcher none: needs --runs"),
        (["--processes", "0"], "--processes 0: must be at least 1"),
        (["--dtype", "float32", "--device", "cuda"], "--device cuda: this PyTorch sees no CUDA device"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments, says, capsys):
    assert run(*arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_print_says_what_to_start(capsys):
    assert (
        run("--launcher", "print", "--layout", "megatron:data=2,tensor=8", "--dtype", "bfloat16", "--responses", "4")
        == 0
    )
    out = capsys.readouterr().out
    assert "# 16 processes" in out
    assert "-m benchmarks.scaling.worker --layout megatron:data=2,tensor=8 --mode strong --responses 4" in out
    assert "--dtype bfloat16" in out


def test_a_report_of_files_names_what_is_missing(tmp_path, capsys):
    settings = Settings(responses=4)
    launch = launch_of(Layout("fsdp"), settings, "weak")
    machine = {
        "device": "cpu",
        "cores": 2,
        "nodes": 1,
        "torch_threads": 1,
        "accelerator": None,
        "cpu": "x",
        "torch": "2",
    }
    machine |= {
        "transformers": "5",
        "python": "3",
        "load_average_before": None,
        "load_average_after": None,
        "backend": "gloo",
    }
    write(tmp_path / f"{launch.name}.json", settings, dataclasses.replace(measured(launch), machine=machine))
    arguments = ["--launcher", "none", "--runs", str(tmp_path), "--out", str(tmp_path / "out"), "--responses", "4"]
    assert run(*arguments, "--parallel", "data", "--mode", "weak", "--processes", "1", "2") == 1
    assert "fsdp:data=2, 8 responses: no result" in " ".join(capsys.readouterr().out.split())
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir() if p.suffix != ".png") == [".csv", ".json", ".md"]
