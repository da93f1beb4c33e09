"""The studies of rivals and of where credit matters: the measure, what a training spends, masked copies, factors."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from benchmarks.learning import comparison, factors, training
from benchmarks.learning.cost import flops_of, gain_at_equal, reward_until
from benchmarks.learning.plan import PLANS, Pairs, Plan, Setting, read_plan
from benchmarks.learning.training import Credit, Record, Run, counted, forward, importance, roll_out
from benchmarks.statistics import mean_over_clusters
from benchmarks.tiny.words import PAD
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request
from tests.benchmarks.test_learning import RUN, TASK, model, rollout, writes  # noqa: F401

METHODS = {"grpo": Credit(), "fisher": Credit(importance="fisher")}
PLAN = Plan("x", "x", ("chain",), METHODS, (1e-3,), Pairs((), ()), Pairs((0, 1, 2, 3), (0,)), steps=6)
RISES = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def record(rewards, held_out, name="grpo", warm=0):
    steps = [{"reward": reward, "tokens": 10.0, "used": 4, "length": 5.0} for reward in rewards]
    parts = {"forward_flops": 20.0, "importance_flops": 20.0 * (name != "grpo"), "update_flops": 40.0}
    run = Run(task="chain", credit=METHODS[name], lr=1e-3, warm=warm, seed=0)
    return name, Record(run, "", [steps[0] | parts, *steps[1:]], held_out)


def shown(plan, judged, title):
    (table,) = (table for table in comparison.tables(plan, [], judged) if table.title.startswith(title))
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


# ---- plans


def test_nothing_is_judged_on_models_of_earlier_plans_and_the_new_ones_share_trainings():
    plans = {file.stem: read_plan(file) for file in PLANS.glob("*.yaml")}
    rivals, where, third = new = [plans.pop(name) for name in ("rivals", "where", "factors")]
    earlier = {warm for plan in plans.values() for pairs in (plan.judge, plan.choose) for warm in pairs.warm}
    assert all(earlier.isdisjoint(plan.judge.warm) and plan.judge == rivals.judge for plan in new)
    assert len(rivals.judge.all()) == 24
    runs = [{run for _, run in plan.runs(plan.judge, {key: [1e-3] for key in every(plan)})} for plan in new]
    assert len(runs[0] & runs[1]) == 24 * 2 * len(where.methods)
    assert len(runs[0] & runs[2]) == 24 * len(third.methods)
    assert {run for _, run in where.grid() if run.task != "parallel_1"} < {run for _, run in rivals.grid()}


def every(plan):
    return [(task, name) for task in plan.settings for name in plan.methods]


def test_levels_are_named_by_what_is_not_as_usual(tmp_path):
    levels = {"8": {"task": "parallel_2"}, "4": {"task": "parallel_2", "prompts": 32, "copies": 4}}
    levels |= {"noise": {"task": "parallel_2", "flips": 0.1}, "old": {"task": "chain", "earlier": "learning_judged"}}
    pairs = {"choose": {"warm": [], "seeds": []}, "judge": {"warm": [0], "seeds": [0]}}
    values = {"title": "x", "tasks": [], "rates": [1e-3], "methods": {"grpo": {}}, "factors": {"all": levels}, **pairs}
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    plan = read_plan(file)
    trained = [run for _, run in plan.runs(plan.judge, {key: [1e-3] for key in every(plan)})]
    found = {run.setting: (run.prompts, run.copies, run.flips) for run in trained}
    assert list(found) == list(plan.settings), "an earlier study's trainings are not made again"
    wanted = {"parallel_2": (16, 8, 0.0), "parallel_2, 32 x 4": (32, 4, 0.0), "parallel_2, 10% flipped": (16, 8, 0.1)}
    assert found == wanted


# ---- the measure


def test_the_trimmed_mean_is_yuens_and_models_that_fall_apart_decide_nothing():
    gains = [0.01, 0.02, 0.03, 0.015, 0.025, 0.02, 0.03, 0.01, 0.02, 0.025, 0.02, 0.015]
    estimate, p = mean_over_clusters([[gain] for gain in gains], 0.2)
    error = np.clip(gains, *np.sort(gains)[[2, -3]]).std(ddof=1) * math.sqrt(12) / 8
    assert estimate.value == pytest.approx(np.mean(sorted(gains)[2:-2]))
    assert estimate.high - estimate.value == pytest.approx(error * stats.t.ppf(0.975, 7))
    assert p == pytest.approx(2 * stats.t.sf(estimate.value / error, 7))
    fallen = [[gain - 0.6 * (at in (2, 6))] for at, gain in enumerate(gains)]
    assert mean_over_clusters(fallen, 0.2)[0].low > 0.01
    assert mean_over_clusters(fallen)[0].value < 0
    assert mean_over_clusters([[1.0], [2.0], [4.0]], 0.2) == mean_over_clusters([[1.0], [2.0], [4.0]]), "none to cut"


def test_what_falls_apart_is_counted_beside_the_gain():
    falls = [0.4, 0.8, 0.8, 0.8, 0.8, 0.2]
    cases = [
        (RISES, 0.9, False),
        (falls, 0.3, True),
        (falls, 0.63, False),
        (falls, 0.61, True),
        ([0.9, 0.9], 0.1, False),
    ]
    runs = comparison.by_run([record(*case[:2]) for case in cases])
    assert list(comparison.fell_apart(runs)) == [wanted for *_, wanted in cases]
    judged = [record(RISES, 0.9, name, warm) for warm in range(4) for name in METHODS]
    rows = shown(replace(PLAN, trim=0.25), [*judged[:-1], record(falls, 0.3, "fisher", 3)], "chain: mean reward over")
    assert [row["fell apart"] for row in rows] == ["0 of 4", "1 of 4"]
    assert rows[1]["minus GRPO's (95 %)"] == "+0.000", "one of four models is left out at each end"


# ---- what a training spends


def test_flops_of_a_step_are_in_proportion_to_its_tokens():
    steps = [{"tokens": 100.0, "used": 8, "length": 5.0}, {"tokens": 200.0, "used": 4, "length": 10.0}]
    steps += [{"tokens": 100.0, "used": 0, "length": 5.0}]
    first = steps[0] | {"forward_flops": 40.0, "importance_flops": 20.0, "update_flops": 80.0}
    # A token of the forward costs 1: so much to sample 100, and 140 to train on 40.
    assert flops_of([first, *steps[1:]]).tolist() == [240, 340, 100]
    assert np.isnan(flops_of(steps)).all()


def test_gains_at_equal_cost():
    assert reward_until([0.2, 0.4, 0.9], np.array([1.0, 2.0, 2.0]), 4.0) == pytest.approx((0.2 + 0.8 + 0.9) / 4)
    dearer = gain_at_equal(RISES[:3], np.full(3, 1.5), RISES[:3], np.ones(3))
    assert dearer == pytest.approx(0.45 - 0.5), "two steps for the price of three"
    assert gain_at_equal(RISES[:3], np.ones(3), RISES[:3], np.full(3, 1.5)) == pytest.approx(-dearer)
    _, row = shown(PLAN, [record(RISES, 0.9, name) for name in METHODS], "chain: gain at equal cost")
    # GRPO's step costs 70, this one's 90: in GRPO's 420 there are 4 2/3 of its steps.
    wanted = (0.4 + 0.5 + 0.6 + 0.7 + 0.8 * 2 / 3) / (4 + 2 / 3) - 0.65
    assert row["at equal FLOPs"] == f"{wanted:+.3f}"
    assert row["gain at equal steps (95 %)"] == row["at equal tokens sampled"] == "+0.000"


def test_flops_are_counted_and_change_nothing(model, rollout):  # noqa: F811
    before = [parameter.clone() for parameter in model.parameters()]
    runs = (replace(RUN, credit=credit) for credit in METHODS.values())
    plain, fisher = (counted(run, model, rollout, 0) for run in runs)
    longest = (rollout.prompt_length + rollout.response_BL.sum(-1)).max().item()
    least = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2) * len(rollout.token_BL) * longest
    assert 1 < plain["forward_flops"] / least < 1.5, "twice the parameters a token, and attention"
    assert plain["update_flops"] / plain["forward_flops"] == pytest.approx(2.5, abs=0.5)
    assert plain["importance_flops"] == 0 < fisher["importance_flops"]
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- importances, rewards and factors


@pytest.mark.parametrize("credit", [("span_masking", "answer_joint"), ("oar_p", "answer_mean"), ("oar_p", "last")])
def test_masked_copies_of_many_responses_score_as_the_packages(credit, model, rollout):  # noqa: F811
    run = replace(RUN, credit=Credit(importance=credit[0], probe=credit[1]))
    request = Request.from_config(run.credit.config(0), 1, rollout.token_BL.shape[1], replacement_token=PAD)
    there_BL = batch_importance(model, request, rollout.token_BL, rollout.segments_BL, rollout.token_BL != PAD)
    here_BL = importance(run, rollout, forward(model, rollout), 0)
    assert (here_BL > 0).sum() > 20
    torch.testing.assert_close(here_BL, there_BL, rtol=1e-3, atol=1e-5)


def test_flipped_rewards_change_advantages_alone(model, rollout, monkeypatch):  # noqa: F811
    monkeypatch.setattr(training, "sample", writes(TASK, random.Random(0)))
    noisy = roll_out(model, TASK, random.Random(0), torch.Generator(), RUN.prompts, RUN.copies, flips=0.4)
    assert noisy.graded == rollout.graded, "what is reported is right or wrong, not what was seen"
    assert not torch.equal(noisy.advantage_B, rollout.advantage_B)


def test_a_factor_shows_each_level_with_its_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(factors, "RESULTS", tmp_path)
    levels = {
        "8": Setting("chain"),
        "4": Setting("chain", prompts=32, copies=4),
        "old": Setting("parallel", earlier="x"),
    }
    plan = replace(PLAN, tasks=(), factors={"group size": levels})
    judged = [record([0.5 + (name == "fisher") * warm / 50], 0.5, name, warm) for warm in (1, 2) for name in METHODS]
    rows = [{"task": "parallel", "warm": warm, "seed": 0, "start": ""} for warm in (1, 2)]
    old = [row | {"method": name, "reward": 0.1 * row["warm"] * (name == "fisher")} for row in rows for name in METHODS]
    (tmp_path / "x.json").write_text(json.dumps({"runs": {"judged_on": old}}))
    (table,) = factors.tables(plan, judged)
    assert [[row[0], row[1][:6]] for row in table.rows] == [["8", "+0.030"], ["4", "-"], ["old", "+0.150"]]
    (panel,) = factors.draw(plan, judged).axes
    (line,) = panel.containers
    assert line[0].get_ydata().tolist() == pytest.approx([0.03, 0.15])
