"""The study of whole runs: comparable steps, the figures, and one real run."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.run import assets, study
from benchmarks.run.study import IMPORTANCE, WARM_UP, Settings, check_comparable

WORK = {name: float(value) for name, value in study.expected_work(Settings()).items()}
OAR = {"bench/oar": 1.0, "timing_s/oar": 0.3, "timing_s/old_log_prob": 2.2, "oar/scored": 0.5}
GRPO = {"bench/oar": 0.0}


def step(more, seconds=10.0):
    """The study's figures of a step that verl's file logger wrote."""
    timing = {"gen": 4.0, "old_log_prob": 2.0, "adv": 0.5, "update_actor": 2.5, "update_weights": 0.75, "step": seconds}
    timing = {f"timing_s/{name}": value for name, value in timing.items()}
    return study.parse_step({"step": 3, **timing, **WORK, **more}, "run 1 of 1")


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (OAR, {"oar/scored": 0.25}, "OAR's step 3 of run 1 of 1 has oar/scored 0.25 in place of 0.5"),
        (GRPO, {"critic/score/mean": 0.5}, "critic/score/mean 0.5 in place of 0.25"),
        (GRPO, {"bench/oar": 1.0, "oar/scored": 0.5}, "not one of each method"),
    ],
)
def test_unequal_work_is_refused(line, change, message):
    check_comparable(Settings(), [step(OAR), step(GRPO)])
    with pytest.raises(RuntimeError, match=message):
        check_comparable(Settings(), [step(one | change if one is line else one) for one in (OAR, GRPO)])


def test_ratios_are_medians_over_pairs_and_the_second_leaves_out_what_is_the_same():
    """The machine was ten times slower during one pair, whose ratio counts as one of three."""
    order = [assets.is_oar(number) for number in range(WARM_UP + 1, WARM_UP + 7)]
    assert order == [True, False, False, True, True, False], "who is first alternates"
    seconds = {True: iter((10.5, 106.0, 11.0)), False: iter((10.0, 100.0, 10.0))}
    steps = [step(OAR if is_oar else GRPO, next(seconds[is_oar])) for is_oar in order]
    table, phases = study.report_of(Settings(), steps, [], 11_000_000).tables
    assert [row[2] for row in table.rows] == ["1.06", "1.02"]
    rows = {row[0]: row[1:] for row in phases.rows}
    assert rows["log-probs"] == ["2.000", "20.0%", "2.200", "+0.200", "+2.0%"]
    assert rows[IMPORTANCE] == ["0.000", "0.0%", "0.300", "+0.300", "+3.0%"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_real_verl_takes_turns(tmp_path):
    """One run of real verl, two steps of each method, the first of each thrown away."""
    pytest.importorskip("vllm")
    small = "--size 1m --prompts 2 --n 2 --prompt-length 8 --response-length 32 --micro-batch 4 --steps 1 --rounds 1"
    assert main(["run", *small.split(), "--importance", "oar_g", "--out", str(tmp_path)]) == 0
    oar, grpo = json.loads((tmp_path / "run_cpu.json").read_text())["runs"]["steps"]
    assert (oar["oar"], oar["step"], grpo["oar"], grpo["step"]) == (True, 3, False, 4)
    assert oar[IMPORTANCE] > 0 == grpo[IMPORTANCE]
