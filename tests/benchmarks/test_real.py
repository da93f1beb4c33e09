"""The study of real runs: its problems, what it reads of verl's metrics, its page, and one real pair."""

import json

import pandas as pd
import pytest

from benchmarks.__main__ import main
from benchmarks.language import smollm2, tasks
from benchmarks.language.problems import solved_sum
from benchmarks.real import study
from benchmarks.real.study import COLUMNS, PARTS, REWARD, VALIDATION, Settings
from oar_plugin.runs.math.answer import final_answer


def test_no_problem_is_in_both_files_and_examples_end_as_the_reward_reads_it():
    made = tasks.rows(tests=16)
    questions = {split: [row["prompt"][-1]["content"] for row in found] for split, found in made.items()}
    shown = [turn["content"] for turn in made["train"][0]["prompt"][:-1]]
    everything = [*questions["test"], *questions["train"], *shown[::2]]
    assert (len(questions["test"]), len(set(everything)), len(everything)) == (16, len(tasks.ALL), len(tasks.ALL))
    for row in made["train"]:
        numbers = [int(word) for word in row["prompt"][-1]["content"].strip("?").split() if word.isdigit()]
        assert row["reward_model"]["ground_truth"] == str(sum(numbers))
        assert final_answer(solved_sum(numbers)[1]) == str(sum(numbers))


def line(step, reward, **more):
    data = {COLUMNS[name]: 1.0 for name in PARTS} | {COLUMNS[REWARD]: reward} | more
    return json.dumps({"step": step, "data": data}) + "\n"


def test_a_step_made_twice_counts_as_made_last_and_a_half_written_one_not(tmp_path):
    (tmp_path / "start.jsonl").write_text(line(1, 0.25) + line(2, 0.5) + '{"step": 3, "da')
    (tmp_path / "start.1.jsonl").write_text(line(2, 0.75))
    assert study.read_run(tmp_path)[REWARD].to_dict() == {1: 0.25, 2: 0.75}


def test_the_page_has_differences_by_pair_and_seconds_without_the_first_step(tmp_path):
    frames = []
    for seed, gain in ((1, 0.1), (2, 0.3)):
        for variant in study.VARIANTS:
            of = pd.DataFrame({name: [float("nan"), 9.0, 1.0, 2.0] for name in COLUMNS}, index=[0, 1, 2, 3])
            of[REWARD] = [float("nan"), 0.2, 0.4, 0.6 + gain * (variant == "oar")]
            of[VALIDATION] = [0.5, float("nan"), float("nan"), 0.75]
            frames.append(of.assign(seed=seed, variant=variant))
    report = study.report_of(Settings(pairs=2, steps=3), pd.concat(frames), {})
    outcome, parts, pairs = ({row[0]: row[1:] for row in table.rows} for table in report.tables)
    assert outcome["reward, all steps"] == ["0.400", "0.467", "+0.067 (-0.357 to +0.490)", "2 of 2"]
    assert outcome["validation, before"][:3] == ["0.500", "0.500", "+0.000"]
    assert parts["update"] == ["1.5", "1.5", "+0"]
    assert pairs["reward, all steps"] == ["2", "0.400", "0.500", "+0.100"]
    assert json.loads(report.to_json())["runs"]["runs"][0][REWARD] == [None, 0.2, 0.4, 0.6]
    assert {path.name for path in report.write(tmp_path)} == {"real_cpu.md", "real_cpu.json", "real_cpu.png"}


def test_what_cannot_work_is_said_before_anything_starts(capsys):
    assert main(["real", "--prompts", "400"]) == 2
    assert "--prompts 400 --test-problems 128: together at most 508" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing()))
def test_a_real_pair(tmp_path):
    """The same command a second time only reads what the first has left."""
    pytest.importorskip("vllm")
    small = "--pairs 1 --steps 1 --prompts 2 --n 2 --test-problems 2"
    for _ in range(2):
        assert main(["real", *small.split(), "--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    for run in json.loads((tmp_path / "real_cpu.json").read_text())["runs"]["runs"]:
        assert [value is None for value in run[REWARD]] == [True, False], "step 0 is validation alone"
        assert None not in run[VALIDATION]
