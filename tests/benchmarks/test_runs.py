"""Studies of whole runs of verl: comparable steps, problems, what is read of verl's metrics, pages, and real runs."""

import json
import re

import pandas as pd
import pytest

from benchmarks.__main__ import main
from benchmarks.language import tasks
from benchmarks.language.problems import solved_sum
from benchmarks.real import study as real
from benchmarks.real.study import COLUMNS, PARTS, REWARD, VALIDATION
from benchmarks.run import assets
from benchmarks.run import study as run
from oar_plugin.runs.math.answer import final_answer

WORK = {name: float(value) for name, value in run.expected_work(run.Settings()).items()}
OAR = {"bench/oar": 1.0, "timing_s/oar": 0.3, "timing_s/old_log_prob": 2.2, "oar/scored": 0.5}
GRPO = {"bench/oar": 0.0}


def step_of(more, seconds=10.0):
    timing = {"gen": 4.0, "old_log_prob": 2.0, "adv": 0.5, "update_actor": 2.5, "update_weights": 0.75, "step": seconds}
    timing = {f"timing_s/{name}": value for name, value in timing.items()}
    return run.parse_step({"step": 3, **timing, **WORK, **more}, "run 1 of 1")


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (OAR, {"oar/scored": 0.25}, "OAR's step 3 of run 1 of 1 has oar/scored 0.25 in place of 0.5"),
        (GRPO, {"critic/score/mean": 0.5}, "critic/score/mean 0.5 in place of 0.25"),
        (GRPO, {"bench/oar": 1.0, "oar/scored": 0.5}, "not one of each method"),
    ],
)
def test_unequal_work_is_refused(line, change, message):
    run.check_comparable(run.Settings(), [step_of(OAR), step_of(GRPO)])
    with pytest.raises(RuntimeError, match=message):
        run.check_comparable(run.Settings(), [step_of(one | change if one is line else one) for one in (OAR, GRPO)])


def test_ratios_are_medians_over_pairs_and_the_second_leaves_out_what_is_the_same():
    """The machine was ten times slower during one pair, whose ratio counts as one of three."""
    order = [assets.is_oar(number) for number in range(run.WARM_UP + 1, run.WARM_UP + 7)]
    assert order == [True, False, False, True, True, False], "who is first alternates"
    seconds = {True: iter((10.5, 106.0, 11.0)), False: iter((10.0, 100.0, 10.0))}
    steps = [step_of(OAR if is_oar else GRPO, next(seconds[is_oar])) for is_oar in order]
    table, phases = run.report_of(run.Settings(), steps, [], 11_000_000).tables
    assert [row[2] for row in table.rows] == ["1.06", "1.02"]
    rows = {row[0]: row[1:] for row in phases.rows}
    assert rows["log-probs"] == ["2.000", "20.0%", "2.200", "+0.200", "+2.0%"]
    assert rows[run.IMPORTANCE] == ["0.000", "0.0%", "0.300", "+0.300", "+3.0%"]


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
    assert oar[run.IMPORTANCE] > 0 == grpo[run.IMPORTANCE]


def test_no_problem_is_in_both_files_and_the_reward_reads_its_solution():
    made = tasks.rows(tests=16)
    shown = [turn["content"] for turn in made["train"][0]["prompt"][:-1]]
    asked = [row["prompt"][-1]["content"] for found in made.values() for row in found]
    assert (len(made["test"]), len({*asked, *shown[::2]})) == (16, len(tasks.ALL))
    for row in made["train"]:
        numbers = [*map(int, re.findall(r"\d+", row["prompt"][-1]["content"]))]
        assert final_answer(solved_sum(numbers)[1]) == row["reward_model"]["ground_truth"] == str(sum(numbers))


def line(step, reward, **more):
    data = {COLUMNS[name]: 1.0 for name in PARTS} | {COLUMNS[REWARD]: reward} | more
    return json.dumps({"step": step, "data": data}) + "\n"


def test_a_step_made_twice_counts_as_made_last_and_a_half_written_one_not(tmp_path):
    (tmp_path / "start.jsonl").write_text(line(1, 0.25) + line(2, 0.5) + '{"step": 3, "da')
    (tmp_path / "start.1.jsonl").write_text(line(2, 0.75))
    assert real.read_run(tmp_path)[REWARD].to_dict() == {1: 0.25, 2: 0.75}


def test_the_page_has_differences_by_pair_and_seconds_without_the_first_step(tmp_path):
    frames = []
    for seed, gain in ((1, 0.1), (2, 0.3)):
        for variant in real.VARIANTS:
            of = pd.DataFrame({name: [float("nan"), 9.0, 1.0, 2.0] for name in COLUMNS}, index=[0, 1, 2, 3])
            of[REWARD] = [float("nan"), 0.2, 0.4, 0.6 + gain * (variant == "oar")]
            of[VALIDATION] = [0.5, float("nan"), float("nan"), 0.75]
            frames.append(of.assign(seed=seed, variant=variant))
    report = real.report_of(real.Settings(pairs=2, steps=3), pd.concat(frames), {})
    outcome, parts, pairs = ({row[0]: row[1:] for row in table.rows} for table in report.tables)
    assert outcome["reward, all steps"] == ["0.400", "0.467", "+0.067 (-0.357 to +0.490)", "2 of 2"]
    assert outcome["validation, before"][:3] == ["0.500", "0.500", "+0.000"]
    assert parts["update"] == ["1.5", "1.5", "+0"]
    assert pairs["reward, all steps"] == ["2", "0.400", "0.500", "+0.100"]
    assert json.loads(report.to_json())["runs"]["runs"][0][REWARD] == [None, 0.2, 0.4, 0.6]
    assert {path.name for path in report.write(tmp_path)} == {"real_cpu.md", "real_cpu.json", "real_cpu.png"}
