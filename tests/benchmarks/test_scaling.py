"""The scaling study: layouts, their batches, failed launches, the figures, and one run over two processes."""

import itertools
import json
import time

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.report import silent
from benchmarks.scaling import study
from benchmarks.scaling.layouts import FAILED, Launch, Layout, Work
from benchmarks.scaling.study import Settings, measure
from benchmarks.workload import Workload
from tests.limits import PROCESS_S

MACHINE = {"device": "cpu", "cores": 2, "nodes": 1, "backend": "gloo", "load_average_before": [1, 1, 1]}


def write_result(runs, launch, importance=1.0, slow=1.0, first_score=0.5):
    """GRPO takes 4 s times `slow`, OAR so many seconds more; rounds drift by a little, both methods alike, and one is bad."""
    drift = slow * np.array([1.0, 1.01, 1.02, 3.0, 1.03])
    grpo = {"log_prob": list(drift), "update": list(3 * drift)}
    oar = {"log_prob": list((1 + importance) * drift), "driver": list(0 * drift), "update": list(3 * drift)}
    seconds = {"grpo": grpo, "oar": oar}
    measured = {"seconds": seconds, "cpu_seconds": seconds, "machine": MACHINE, "scores": [1.0, first_score]}
    launch.file(runs).write_text(json.dumps(launch.told() | measured | {"parameters": 7_000_000}))


@pytest.mark.parametrize(
    ("text", "processes"), [("fsdp", 1), ("fsdp:data=4,sequence=2", 8), ("megatron:data=3,tensor=2,pipeline=5", 30)]
)
def test_a_layout_and_its_text(text, processes):
    assert str(Layout.parse(text)) == text
    assert Layout.parse(text).processes == processes


def test_only_data_parallelism_has_two_modes_and_weak_grows_the_batch():
    given = ("megatron:tensor=8", "megatron:tensor=8,data=8")
    settings = Settings(responses=8, parallel=("data", "tensor"), processes=(4, 1, 2, 2), layout=given)
    shown = {name: [(x.layout.processes, x.work.responses) for x in each] for name, each in settings.series().items()}
    assert shown == {
        "layouts, weak": [(8, 8), (64, 64)],
        "layouts, strong": [(8, 8), (64, 8)],
        "data, weak": [(1, 8), (2, 16), (4, 32)],
        "data, strong": [(1, 8), (2, 8), (4, 8)],
        "tensor": [(1, 8), (2, 8), (4, 8)],
    }


def test_a_result_of_other_arguments_or_of_another_kind_is_not_taken(tmp_path):
    launch = Launch(Layout("fsdp"), Work(size="1m", responses=8))
    write_result(tmp_path, Launch(Layout("fsdp"), Work(size="1m", responses=8, rounds=3)))
    assert launch.result(tmp_path)["scores"] == [1.0, 0.5], "rounds may differ"
    with pytest.raises(RuntimeError, match=r"other arguments: size$"):
        Launch(Layout("fsdp"), Work(size="tiny", responses=8)).result(tmp_path)
    for content in ("", "{}", "[]"):
        launch.file(tmp_path).write_text(content)
        with pytest.raises(RuntimeError, match="not a result of"):
            launch.result(tmp_path)


def test_an_old_file_is_not_taken_for_the_result_of_a_launch_that_fails(tmp_path, monkeypatch):
    settings = Settings(layout=("fsdp",), runs=tmp_path)
    write_result(tmp_path, Launch(Layout("fsdp"), settings))
    monkeypatch.setattr(study, "torchrun", lambda *_: None)
    with pytest.raises(RuntimeError, match="nothing was measured; fsdp, 16 responses: no result"):
        measure(settings)


def test_the_reason_is_the_workers_own_line_or_the_end_of_the_log():
    log = f"warning\n[rank1] {FAILED} ValueError: too big\nTraceback\n{FAILED} other"
    assert study.reason_in(log, 1) == "ValueError: too big"
    assert study.reason_in("x " * 1000 + "Killed", 137).endswith("Killed")
    assert study.reason_in("", 137).startswith("exit status 137")


def test_print_says_what_to_start_on_every_node(capsys):
    arguments = ["--layout", "megatron:data=2,tensor=8", "--model", "/models/big", "--responses", "4"]
    assert main(["scaling", "--launcher", "print", *arguments]) == 0
    first, second, *_ = capsys.readouterr().out.strip().splitlines()
    assert first == "# 16 processes"
    assert "-m benchmarks.scaling.worker '{" in second
    told = json.loads(second.partition("'")[2].rstrip("'"))
    assert told["layout"] == "megatron:data=2,tensor=8"
    assert (told["path"], told["responses"]) == ("/models/big", 4)


@pytest.fixture
def settings(tmp_path):
    """data on 1, 2, 4 processes, where the ratio is 1.25, 1.25 and 1.5; tensor on 1 and 4, and nothing of 2."""
    settings = Settings(launcher="none", runs=tmp_path, responses=4, parallel=("data", "tensor"))
    for launch in itertools.chain(*settings.series().values()):
        if launch.layout != Layout("megatron", tensor=2):
            importance = 2.0 if launch.layout == Layout("fsdp", data=4) else 1.0
            write_result(tmp_path, launch, importance, slow=launch.layout.processes)
    return settings


def test_medians_ratios_and_phases(settings):
    compared, phases, failed = measure(settings).tables
    rows = {tuple(row[:2]): row[2:] for row in compared.rows}
    assert rows["data, strong", "fsdp"] == ["4", "4.08", "5.1", "1.250", "1.25 .. 1.25", "1.250", "", ""]
    assert rows["data, weak", "fsdp:data=2"][:4] == ["8", "8.16", "10.2", "1.250"]
    assert rows["data, weak", "fsdp:data=4*"][3] == "1.500", "the star: four processes on two cores"
    assert ["fsdp:data=4*", "16", "4.08", "12.2", "0", "12.2", "12.2", "16.3", "24.5"] in phases.rows
    assert failed.rows == [("megatron:tensor=2, 4 responses", "no result: megatron_tensor2_4.json is not there")]


def test_verdicts_and_what_is_missing_are_reported(settings):
    report = measure(settings)
    assert report.failed
    verdicts = {(row[0], row[1].rstrip("*")): row[-1] for row in report.tables[0].rows}
    assert verdicts["data, weak", "fsdp:data=2"] == verdicts["tensor", "megatron:tensor=4"] == "reached"
    assert verdicts["data, weak", "fsdp:data=4"] == "NOT reached"
    assert "PROCESSES SHARE CORES" in report.notes[-1]
    assert len(report.runs["launches"]) == 7
    assert any("OAR's over GRPO's was 1.000" in note for note in report.notes)
    assert any("at most 0 of its largest score" in note for note in report.notes)
    write_result(settings.runs, settings.series()["data, weak"][1], first_score=0.4)
    assert any("at most 0.1 of its largest score" in note for note in measure(settings).notes)
    settings.series()["data, weak"][0].file(settings.runs).unlink()
    judged = {row[0] for row in measure(settings).tables[0].rows if row[-1]}
    assert judged == {"tensor"}, "without the first layout there is no verdict"


def test_a_report_with_a_gap_is_written_and_ends_with_status_1(settings, tmp_path, capsys):
    arguments = ["--launcher", "none", "--runs", str(tmp_path), "--responses", "4"]
    assert main(["scaling", *arguments, "--parallel", "data", "tensor", "--out", str(tmp_path / "out")]) == 1
    assert "megatron_tensor2_4.json is not there" in " ".join(capsys.readouterr().out.split())
    assert {path.suffix for path in (tmp_path / "out").glob("scaling_cpu.*")} == {".json", ".md"}
    assert main(["scaling", *arguments, "--layout", "fsdp:sequence=2"]) == 1
    assert "nothing was measured" in capsys.readouterr().err


@pytest.fixture(scope="module")
def projected():
    pytest.importorskip("verl")
    from benchmarks.scaling import projection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "SIZES", (8, 64, 128))
        return projection.measure(["qwen2_5_32b_megatron"], silent)


def test_projected_weak_grows_the_batch_with_the_gpus_and_strong_shrinks_the_time(projected):
    rows = {(row["mode"], row["gpus"]): row for row in projected.runs["recipes"]["qwen2_5_32b_megatron"]}
    (weak_64, weak_128), (strong_64, strong_128) = ([rows[mode, n] for n in (64, 128)] for mode in ("weak", "strong"))
    assert weak_128["sequences"] == 2 * weak_64["sequences"]
    assert strong_128["sequences"] == strong_64["sequences"]
    assert weak_128["data"] == 2 * weak_64["data"]
    assert weak_128["seconds"]["update"] == pytest.approx(weak_64["seconds"]["update"], rel=0.05)
    assert strong_128["seconds"]["update"] < 0.75 * strong_64["seconds"]["update"]
    assert weak_128["seconds"]["OAR: gate"] < 1.1 * weak_64["seconds"]["OAR: gate"]
    assert 0 < strong_128["seconds"]["OAR: gate"] < 0.6 * strong_64["seconds"]["OAR: gate"]
    log_probs, update = (strong_64["seconds"][phase] for phase in ("log-probs", "update"))
    oar = log_probs + update + sum(strong_64["seconds"][phase] for phase in ("OAR: importance", "OAR: gate"))
    assert strong_64["measured part: OAR / GRPO"] == pytest.approx(oar / (log_probs + update))
    assert 1 < strong_64["step: OAR / GRPO"] < strong_64["measured part: OAR / GRPO"]


def test_a_projection_cannot_be_taken_for_a_measurement_and_names_unknown_recipes(projected):
    assert all("PROJECTED" in table.title for table in projected.tables)
    assert projected.runs["projection"] is True
    assert "must divide the 8 GPUs" in projected.markdown(None)
    with pytest.raises(ValueError, match=r"recipes: .*qwen2_5_14b_deepmath"):
        measure(Settings(project=("nothing",)))


@pytest.mark.slow
def test_two_engines_over_two_processes(tmp_path):
    """Real torchrun, verl's real engines; what was timed is importance, as the plain pass of one process has it."""
    pytest.importorskip("mbridge")
    from benchmarks.step.passes import Passes
    from oar_plugin.config import OarConfig
    from oar_plugin.passes.request import Request

    settings = Settings(
        size="tiny", responses=4, prompt_length=8, response_length=40, answer_length=2, scored_share=0.5, rounds=2,
        parallel=("tensor",), processes=(2,), layout=("fsdp:data=2",), runs=tmp_path,
    )  # fmt: skip
    report = measure(settings)
    assert [launch["layout"] for launch in report.runs["launches"]] == ["fsdp:data=2", "megatron:tensor=2"]
    assert report.markdown(None)
    model, batch = Workload.model(settings, 48), settings.batch(40, settings.scored)
    want = Passes(model, batch, Request.from_config(OarConfig.parse({}), 1, 40), 2).fused().importance[0][0, 8:]
    timed = {"grpo": {"log_prob", "update"}, "oar": {"log_prob", "driver", "update"}}
    for launch in report.runs["launches"]:
        assert {method: set(phases) for method, phases in launch["seconds"].items()} == timed
        for phases in launch["seconds"].values():
            assert all(len(values) == 2 and min(values) > 0 for values in phases.values())
        assert (torch.tensor(launch["scores"]) - want).abs().max() < 1e-4 * want.max()
    alone = Launch(Layout("megatron", tensor=2), settings).argument(tmp_path)
    with pytest.raises(RuntimeError, match=r"^ValueError: .* takes 2 processes, and 1 were started$"):
        study.torchrun(1, alone, PROCESS_S)  # the reason is the worker's own line
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done after 0\.5 s"):
        study.torchrun(2, "{}", 0.5)
    assert time.monotonic() - started < 15
