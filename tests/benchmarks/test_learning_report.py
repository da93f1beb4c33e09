import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.learning import report as report
from benchmarks.learning.measure import Record, Run
from benchmarks.machine import describe_machine

MACHINE = {**describe_machine(torch.device("cpu")), "load_average_after": [0.0]}
BASE = Run("parallel", "grpo", 1e-3, 0, steps=20)


def record(method: str, seed: int, lr: float, gain: float, **settings: float) -> Record:
    """Rewards that rise by `gain` a step, and by a little more for odd seeds."""
    steps = [
        {
            "reward": 0.3 + (gain + 0.001 * (seed % 2)) * step,
            "sample_seconds": 1.0,
            "update_seconds": 2.0,
            "importance_seconds": 0.5 if method != "grpo" else 0.0,
        }
        for step in range(20)
    ]
    run = replace(BASE, method=method, seed=seed, lr=lr, **settings)
    return Record(run, steps, {0: 0.3, 20: 0.3 + 20 * gain}, 60.0, 10.0)


@pytest.fixture
def records() -> list[Record]:
    return [
        *(record("grpo", seed, lr, gain) for seed in range(3) for lr, gain in ((1e-3, 0.010), (2e-3, 0.020))),
        *(
            record("fisher", seed, lr, gain + seed / 1e4)
            for seed in range(3)
            for lr, gain in ((1e-3, 0.030), (2e-3, 0.001))
        ),
        record("fisher", 0, 1e-3, 0.025, tau=0.7),
    ]


def test_each_method_is_taken_at_its_best_rate(records):
    chosen = report.best(report.arms(records, "parallel"))
    assert [(arm.name, arm.run.lr) for arm in chosen] == [("fisher", 1e-3), ("fisher tau=0.7", 1e-3), ("grpo", 2e-3)]


def test_comparison_is_the_paired_test(records):
    fisher = next(c for c in report.compare(report.arms(records, "parallel")) if c.arm.name == "fisher")
    ours, theirs = fisher.arm.rewards(), fisher.baseline.rewards()
    expected = stats.ttest_rel(list(ours.values()), list(theirs.values()))
    assert fisher.p == pytest.approx(expected.pvalue)
    assert fisher.difference == pytest.approx(sum(ours.values()) / 3 - sum(theirs.values()) / 3)
    assert fisher.interval[0] < fisher.difference < fisher.interval[1]
    assert (fisher.seeds, fisher.wins) == (3, 3)


def test_steps_are_compared_at_the_highest_threshold_that_both_reach(records):
    fisher = next(c for c in report.compare(report.arms(records, "parallel")) if c.arm.name == "fisher")
    reached = [
        [report.reach(report.smooth(arm.records[key].series("reward")), 0.6) for key in sorted(arm.records)]
        for arm in (fisher.arm, fisher.baseline)
    ]
    differences = [ours - theirs for ours, theirs in zip(*reached, strict=True)]
    assert fisher.threshold == 0.6, "GRPO ends at 0.67"
    assert fisher.steps == sorted(differences)[1] < 0
    assert fisher.p_steps == pytest.approx(stats.wilcoxon(differences).pvalue)


def test_a_rate_that_was_run_less_often_is_not_chosen(records):
    lucky = record("grpo", 0, 4e-3, 0.035)
    chosen = report.best(report.arms([*records, lucky], "parallel"))
    assert next(arm.run.lr for arm in chosen if arm.name == "grpo") == 2e-3


def test_one_seed_is_no_test(records):
    single = next(c for c in report.compare(report.arms(records, "parallel")) if "tau" in c.arm.name)
    assert single.seeds == 1
    assert single.p is None
    assert report.test_cells(single)[4] == "too few pairs"


def test_steps_to_a_threshold_use_smoothed_rewards():
    values = [0.3, 0.9, 0.3, 0.3, 0.3, 0.7, 0.7, 0.7, 0.7, 0.7]
    assert report.reach(report.smooth(values), 0.65) == 10
    assert report.reach(report.smooth(values), 0.71) is None


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_keeps_the_order_and_never_lowers(p_list):
    corrected = report.holm(p_list)
    assert all(p <= q <= 1 for p, q in zip(p_list, corrected, strict=True))
    order = sorted(range(len(p_list)), key=lambda i: p_list[i])
    assert [corrected[i] for i in order] == sorted(corrected)


def test_holm_by_hand():
    assert report.holm([0.04, None, 0.01, 0.03]) == pytest.approx([0.06, None, 0.03, 0.06])


def test_page_has_every_table_and_no_claim_without_grpo(records):
    page = report.markdown(records, "learning.png", "oar bench learning", MACHINE)
    for text in ("fisher tau=0.7", "p (Holm)", "to 50%", "learning.png", "importance, s a step"):
        assert text in page
    alone = report.markdown([r for r in records if r.run.method == "fisher"], None, "oar bench learning", MACHINE)
    assert "p (Holm)" not in alone.split("## How to read it")[0]
    assert list(json.loads(report.to_json(records, "oar bench learning", MACHINE))["tasks"]) == ["parallel"]


def test_seconds_hold_importance_once(records):
    arm = next(arm for arm in report.arms(records, "parallel") if arm.name == "fisher" and arm.run.lr == 1e-3)
    assert arm.seconds()[-1] == pytest.approx(20 * 3.5)
    assert math.isnan(arm.mean("recall"))


def test_plot(records, tmp_path):
    pytest.importorskip("matplotlib")
    assert report.draw(tmp_path / "plot.png", records)
    assert (tmp_path / "plot.png").stat().st_size > 1000
