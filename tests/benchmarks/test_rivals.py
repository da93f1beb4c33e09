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
from benchmarks.tiny.model import build_model
from benchmarks.tiny.words import PAD
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.request import Request
from tests.benchmarks.test_learning import RUN, TASK, writes

METHODS = {"grpo": Credit(), "fisher": Credit(importance="fisher")}


@pytest.fixture
def model():
    return build_model(0, hidden=16, layers=1)


@pytest.fixture
def rollout(model, monkeypatch):
    monkeypatch.setattr(training, "sample", writes(TASK, random.Random(0)))
    return roll_out(model, TASK, random.Random(0), torch.Generator(), RUN.prompts, RUN.copies)


# ---- plans


def test_the_two_studies_share_their_trainings_with_two_steps():
    rivals, where = (read_plan(PLANS / f"{name}.yaml") for name in ("rivals", "where"))
    rates = {(task, name): [1e-3] for plan in (rivals, where) for task in plan.settings for name in plan.methods}
    judged = [{(name, run) for name, run in plan.runs(plan.judge, rates)} for plan in (rivals, where)]
    assert len(rivals.judge.all()) == 24
    assert {name for name, run in judged[0] & judged[1] if run.task == "parallel_2"} == set(where.methods)
    grids = [{run for _, run in plan.grid() if run.task == "chain_2"} for plan in (rivals, where)]
    assert grids[1] < grids[0]


def test_nothing_is_judged_on_models_of_earlier_plans():
    plans = {file.stem: read_plan(file) for file in PLANS.glob("*.yaml")}
    new = {"rivals", "where", "factors"} & set(plans)
    earlier = {
        warm for name in set(plans) - new for pairs in (plans[name].judge, plans[name].choose) for warm in pairs.warm
    }
    assert all(earlier.isdisjoint(plans[name].judge.warm) for name in new)


def test_levels_are_named_by_what_is_not_as_usual(tmp_path):
    levels = {"8": {"task": "parallel_2"}, "4": {"task": "parallel_2", "prompts": 32, "copies": 4}}
    levels |= {"noise": {"task": "parallel_2", "flips": 0.1}, "old": {"task": "chain", "earlier": "learning_judged"}}
    pairs = {"choose": {"warm": [], "seeds": []}, "judge": {"warm": [0], "seeds": [0]}}
    values = {"title": "x", "tasks": [], "rates": [1e-3], "methods": {"grpo": {}}, "factors": {"all": levels}, **pairs}
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    plan = read_plan(file)
    shown = {"parallel_2": (16, 8, 0.0), "parallel_2, 32 x 4": (32, 4, 0.0), "parallel_2, 10% flipped": (16, 8, 0.1)}
    assert list(plan.settings) == list(shown), "an earlier study's trainings are not made again"
    trained = [run for _, run in plan.runs(plan.judge, {(task, "grpo"): [1e-3] for task in shown})]
    assert {run.setting: (run.prompts, run.copies, run.flips) for run in trained} == shown


# ---- the measure


def test_the_trimmed_mean_is_yuens_and_two_models_that_fall_apart_decide_nothing():
    gains = [0.01, 0.02, 0.03, 0.015, 0.025, 0.02, 0.03, 0.01, 0.02, 0.025, 0.02, 0.015]
    estimate, p = mean_over_clusters([[gain] for gain in gains], 0.2)
    ranked = sorted(gains)
    winsorized = np.clip(ranked, ranked[2], ranked[-3])
    error = winsorized.std(ddof=1) * math.sqrt(12) / 8
    assert estimate.value == pytest.approx(np.mean(ranked[2:-2]))
    assert estimate.high - estimate.value == pytest.approx(error * stats.t.ppf(0.975, 7))
    assert p == pytest.approx(2 * stats.t.sf(estimate.value / error, 7))
    fallen, p_fallen = mean_over_clusters([[gain - 0.6 * (at in (2, 6))] for at, gain in enumerate(gains)], 0.2)
    assert fallen.low > 0.01
    assert p_fallen < 0.001
    plain, p_plain = mean_over_clusters([[gain - 0.6 * (at in (2, 6))] for at, gain in enumerate(gains)])
    assert plain.value < 0
    assert p_plain > 0.05
    assert mean_over_clusters([[1.0], [2.0], [4.0]], 0.2) == mean_over_clusters([[1.0], [2.0], [4.0]]), "none to cut"


def record(rewards, held_out, name="grpo", warm=0, **settings):
    run = Run(task="chain", credit=METHODS[name], lr=1e-3, warm=warm, seed=0, **settings)
    steps = [{"reward": reward, "tokens": 10.0, "used": 4, "length": 5.0} for reward in rewards]
    parts = {"forward_flops": 20.0, "importance_flops": 20.0 * (name != "grpo"), "update_flops": 40.0}
    return name, Record(run, "", [steps[0] | parts, *steps[1:]], held_out)


def test_what_falls_apart_is_counted_beside_the_gain():
    rises, falls, short = [0.4, 0.5, 0.6, 0.7, 0.8, 0.8], [0.4, 0.8, 0.8, 0.8, 0.8, 0.2], [0.9, 0.9]
    cases = [(rises, 0.8, False), (falls, 0.3, True), (falls, 0.63, False), (falls, 0.61, True), (short, 0.1, False)]
    runs = comparison.by_run([record(rewards, held_out) for rewards, held_out, _ in cases])
    assert list(comparison.fell_apart(runs)) == [wanted for *_, wanted in cases]
    pairs = Pairs(tuple(range(4)), (0,))
    plan = Plan("x", "x", ("chain",), METHODS, (1e-3,), Pairs((), ()), pairs, trim=0.25, steps=6)
    judged = [record(rises, 0.8, name, warm) for warm in range(4) for name in METHODS]
    judged[-1] = record(falls, 0.3, "fisher", 3)
    first, *_ = comparison.tables(plan, [], judged)
    shown = [dict(zip(first.columns, row, strict=True)) for row in first.rows]
    assert [row["fell apart"] for row in shown] == ["0 of 4", "1 of 4"]
    assert shown[1]["minus GRPO's (95 %)"].startswith("+0.000"), "one of four models is left out at each end"


# ---- what a training spends


def test_a_budget_ends_within_a_step():
    assert reward_until([0.2, 0.4, 0.9], np.array([1.0, 2.0, 2.0]), 4.0) == pytest.approx((0.2 + 0.8 + 0.9) / 4)
    same = [0.2, 0.4, 0.6]
    dearer = gain_at_equal(same, np.full(3, 1.5), same, np.ones(3))
    assert dearer == pytest.approx((0.2 + 0.4) / 2 - 0.4), "the dearer one has two steps for the price of three"
    assert gain_at_equal(same, np.ones(3), same, np.full(3, 1.5)) == pytest.approx(-dearer)
    assert gain_at_equal(same, np.ones(3), same, np.ones(3)) == 0


def test_flops_of_a_step_are_in_proportion_to_its_tokens():
    steps = [{"tokens": 100.0, "used": 8, "length": 5.0}, {"tokens": 200.0, "used": 4, "length": 10.0}]
    steps += [{"tokens": 100.0, "used": 0, "length": 5.0}]
    counted_once = steps[0] | {"forward_flops": 40.0, "importance_flops": 20.0, "update_flops": 80.0}
    # A token of the forward costs 1: so much to sample 100, and 140 to train on 40.
    assert flops_of([counted_once, *steps[1:]]).tolist() == [240, 340, 100]
    assert np.isnan(flops_of(steps)).all()


def test_flops_are_counted_and_change_nothing(model, rollout):
    before = [parameter.clone() for parameter in model.parameters()]
    found = {
        name: counted(replace(RUN, credit=Credit(importance=name)), model, rollout, 0) for name in (None, "fisher")
    }
    of = found[None]
    longest = (rollout.prompt_length + rollout.response_BL.sum(-1)).max().item()
    # Of one layer without its attention, and the projection: twice the parameters a token.
    least = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2) * len(rollout.token_BL) * longest
    assert 1 < of["forward_flops"] / least < 1.5
    assert of["update_flops"] / of["forward_flops"] == pytest.approx(2.5, abs=0.5), "torch's recomputes attention"
    assert of["importance_flops"] == 0 < found["fisher"]["importance_flops"]
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gains_at_equal_cost_are_on_the_page():
    plan = Plan("x", "x", ("chain",), METHODS, (1e-3,), Pairs((), ()), Pairs((0, 1), (0,)), steps=6)
    rises = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    judged = [record(rises, 0.9, name, warm) for warm in range(2) for name in METHODS]
    (table,) = (table for table in comparison.tables(plan, [], judged) if table.title == "chain: gain at equal cost")
    shown = dict(zip(table.columns, table.rows[1], strict=True))
    # GRPO's step costs 70, this one's 90: in GRPO's 420 there are 4 2/3 of its steps.
    wanted = (0.4 + 0.5 + 0.6 + 0.7 + 0.8 * 2 / 3) / (4 + 2 / 3) - 0.65
    assert shown["at equal FLOPs"] == f"{wanted:+.3f}"
    assert shown["gain at equal steps (95 %)"] == shown["at equal tokens sampled"] == "+0.000"


# ---- importances and rewards


@pytest.mark.parametrize(
    ("name", "probe"), [("span_masking", "answer_joint"), ("oar_p", "answer_mean"), ("oar_p", "last")]
)
def test_masked_copies_of_many_responses_score_as_the_packages(name, probe, model, rollout):
    run = replace(RUN, credit=Credit(importance=name, probe=probe))
    request = Request.from_config(run.credit.config(0), 1, rollout.token_BL.shape[1], replacement_token=PAD)
    there_BL = batch_importance(model, request, rollout.token_BL, rollout.segments_BL, rollout.token_BL != PAD)
    here_BL = importance(run, rollout, forward(model, rollout), 0)
    assert (here_BL > 0).sum() > 20
    torch.testing.assert_close(here_BL, there_BL, rtol=1e-3, atol=1e-5)


def test_flipped_rewards_change_advantages_alone(model, rollout, monkeypatch):
    monkeypatch.setattr(training, "sample", writes(TASK, random.Random(0)))
    noisy = roll_out(model, TASK, random.Random(0), torch.Generator(), RUN.prompts, RUN.copies, flips=0.4)
    assert noisy.graded == rollout.graded, "what is reported is right or wrong, not what was seen"
    assert not torch.equal(noisy.advantage_B, rollout.advantage_B)
    assert (noisy.advantage_B.view(-1, RUN.copies).sum(-1).abs() < 1e-5).all()


# ---- factors


def test_a_factor_shows_each_level_with_its_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(factors, "RESULTS", tmp_path)
    levels = {
        "8": Setting("chain"),
        "4": Setting("chain", prompts=32, copies=4),
        "old": Setting("parallel", earlier="x"),
    }
    plan = Plan("x", "x", (), METHODS, (1e-3,), Pairs((), ()), Pairs((0, 1), (0,)), factors={"group size": levels})
    judged = [
        record([0.5, 0.5 + (name == "fisher") * (0.1 + warm / 50)], 0.5, name, warm)
        for warm in (0, 1)
        for name in METHODS
    ]
    rows = [
        {"method": name, "task": "parallel", "warm": warm, "seed": 0, "start": ""}
        for warm in (0, 1)
        for name in METHODS
    ]
    rows = [row | {"reward": 0.5 + 0.02 * (row["method"] == "fisher") * (1 + row["warm"])} for row in rows]
    (tmp_path / "x.json").write_text(json.dumps({"runs": {"judged_on": rows}}))
    (table,) = factors.tables(plan, judged)
    assert [row[0] for row in table.rows] == ["8", "4", "old"]
    assert [row[1][:6] for row in table.rows] == ["+0.055", "-", "+0.030"]
    (panel,) = factors.draw(plan, judged).axes
    (line,) = (container for container in panel.containers)
    assert line[0].get_ydata().tolist() == pytest.approx([0.055, 0.03])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["8", "4", "old"]
