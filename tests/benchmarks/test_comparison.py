"""What pages of the study of learning say: plans, statistics by hand, costs, and tables."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.learning import comparison
from benchmarks.learning.cost import flops_of, gain_at_equal, reward_until
from benchmarks.learning.plan import PLANS, Pairs, Plan, read_plan
from benchmarks.learning.training import Credit, Record, Run
from benchmarks.statistics import holm, mean_over_clusters

METHODS = {"grpo": Credit(), "fisher": Credit(importance="fisher")}
PLAN = Plan("x", "x", ("chain",), METHODS, (1e-3,), Pairs((), ()), Pairs((0, 1, 2, 3), (0,)), steps=6)
RISES = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def record(rewards, held_out, name="grpo", warm=0, lr=1e-3, start=""):
    steps = [{"reward": reward, "tokens": 10.0, "used": 4, "length": 5.0} for reward in rewards]
    parts = {"forward_flops": 20.0, "importance_flops": 20.0 * (name != "grpo"), "update_flops": 40.0}
    run = Run(task="chain", credit=METHODS[name], lr=lr, warm=warm, seed=0)
    return name, Record(run, start, [steps[0] | parts, *steps[1:]], held_out)


def shown(plan, judged, title):
    (table,) = (table for table in comparison.tables(plan, [], judged) if table.title.startswith(title))
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_models_that_rates_are_chosen_on_are_not_judged(tmp_path):
    plans = {file.stem: read_plan(file) for file in PLANS.glob("*.yaml")}
    assert all(set(plan.choose.warm).isdisjoint(plan.judge.warm) for plan in plans.values())
    file = tmp_path / "mine.yaml"
    file.write_text((PLANS / "judged.yaml").read_text().replace("warm: [0, 1]", "warm: [0, 3]"))
    with pytest.raises(ValueError, match=r"mine.yaml: choose and judge share warm model 3"):
        read_plan(file)


def test_p_is_over_models_trimmed_as_yuens_and_corrected_for_their_number():
    gains = [0.01, 0.02, 0.03, 0.015, 0.025, 0.02, 0.03, 0.01, 0.02, 0.025, 0.02, 0.015]
    estimate, p = mean_over_clusters([[gain] for gain in gains], 0.2)
    error = np.clip(gains, *np.sort(gains)[[2, -3]]).std(ddof=1) * math.sqrt(12) / 8
    assert estimate.value == pytest.approx(np.mean(sorted(gains)[2:-2]))
    assert estimate.high - estimate.value == pytest.approx(error * stats.t.ppf(0.975, 7))
    assert p == pytest.approx(2 * stats.t.sf(estimate.value / error, 7))
    estimate, p = mean_over_clusters([[1, 3], [4], [5, 6, 7]])
    test = stats.ttest_1samp([2, 4, 6], 0)
    assert (estimate.value, estimate.low, estimate.high, p) == (4, *test.confidence_interval(), test.pvalue)
    for few in ([], [[1.0, 2.0]]):
        assert math.isnan(mean_over_clusters(few)[1])
    assert holm([0.01, math.nan, 0.04, 0.03]) == pytest.approx([0.03, math.nan, 0.06, 0.06], nan_ok=True)


def test_what_falls_apart_is_counted_beside_the_gain():
    plan = replace(PLAN, trim=0.25)
    judged = [record(RISES, 0.9, name, warm) for warm in range(4) for name in METHODS]
    rows = shown(plan, [*judged[:-1], record([0.4, 0.8, 0.8, 0.8, 0.8, 0.2], 0.3, "fisher", 3)], "chain: mean reward")
    assert [row["fell apart"] for row in rows] == ["0 of 4", "1 of 4"]
    assert rows[1]["minus GRPO's (95 %)"] == "+0.000", "one of four models is left out at each end"
    assert rows[1]["not trimmed"].startswith("-0.004 ("), "(0.65 - 0.633) / 4"
    every = shown(plan, [*judged[:-1], record(RISES, 0.95, "fisher", 3)], "Pairs ahead of GRPO")
    assert [(row["all tasks"], row["fell apart"]) for row in every] == [("", "0 of 4"), ("0 of 4", "0 of 4")]


def test_rates_are_those_of_finished_pairs_and_other_weights_make_no_pair():
    plan = replace(PLAN, rates=(1e-3, 2e-3), choose=Pairs((8, 9), (0,)))
    lucky = [record([0.4], 0, warm=8), record([0.5], 0, warm=9), record([0.9], 0, warm=8, lr=2e-3)]
    assert comparison.chosen_rates(plan, lucky)["chain", "grpo"] == 1e-3
    assert comparison.chosen_rates(plan, [*lucky, record([0.1], 0, warm=9, lr=2e-3)])["chain", "grpo"] == 2e-3
    for start, pairs in (("a", 1), ("b", 0)):
        runs = comparison.by_run([record(RISES, 0, start="a"), record(RISES, 0, "fisher", start=start)])
        assert len(comparison.paired(runs, "chain", "fisher")) == pairs


def test_gains_at_equal_cost():
    steps = [{"tokens": 100.0, "used": 8, "length": 5.0}, {"tokens": 200.0, "used": 4, "length": 10.0}]
    first = steps[0] | {"forward_flops": 40.0, "importance_flops": 20.0, "update_flops": 80.0}
    # A token of the forward costs 1: so much to sample 100, and 140 to train on 40.
    assert flops_of([first, steps[1]]).tolist() == [240, 340]
    assert reward_until([0.2, 0.4, 0.9], np.array([1.0, 2.0, 2.0]), 4.0) == pytest.approx((0.2 + 0.8 + 0.9) / 4)
    dearer = gain_at_equal(RISES[:3], np.full(3, 1.5), RISES[:3], np.ones(3))
    assert dearer == pytest.approx(0.45 - 0.5), "two steps for the price of three"
    plan = replace(PLAN, added={"fisher": 0.4})
    _, row = shown(plan, [record(RISES, 0.9, name) for name in METHODS], "chain: gain at equal cost")
    # GRPO's step costs 70, this one's 90: in GRPO's 420 there are 4 2/3 of its steps.
    wanted = (0.4 + 0.5 + 0.6 + 0.7 + 0.8 * 2 / 3) / (4 + 2 / 3) - 0.65
    assert row["at equal FLOPs"] == f"{wanted:+.3f}"
    # GRPO's step costs 10 + 5 x 20 passes, this one's 10 + 7 x 20: in GRPO's 660 there are 4.4 of its steps.
    assert row["at the costs of 7B"] == f"{(0.4 + 0.5 + 0.6 + 0.7 + 0.8 * 0.4) / 4.4 - 0.65:+.3f}"
