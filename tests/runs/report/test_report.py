"""What a report finds in metrics, how it compares two sides, and its page in a browser."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import yaml

from oar_plugin.cli.main import main
from oar_plugin.runs.report.logs import RunLog, findings
from oar_plugin.runs.report.page import Side, comparison, config_differences, panels

REWARD = "critic/score/mean"


def run_of(metrics, name="r", seed=None, resumed=None, state="", **settings):
    """Of lists, whose first value is of step 1."""
    frame = pd.DataFrame(metrics, dtype=float)
    frame.index += 1
    known = {} if seed is None else {"data.seed": seed}
    return RunLog(name, "file", 1, frame, resumed or {}, known | settings, state)


FINE = {
    REWARD: np.linspace(0.1, 0.9, 30),
    "actor/grad_norm": np.tile([0.1, 0.5], 15),
    "actor/entropy": np.linspace(1, 0.2, 30),
    "oar/fallback/any": [0.2] * 30,
    "oar/answer_found": [0.8] * 30,
    "oar/ess_ratio": [0.5] * 30,
    "response_length/clip_ratio": [0.2] * 30,
    "oar/dump_failed": [0] * 30,
}


def at(name, changes):
    column = np.array(FINE[name], dtype=float)
    for place, value in changes.items():
        column[place] = value
    return {**FINE, name: column}


COLLAPSED = at(REWARD, dict.fromkeys(range(20, 30), 0.0))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (run_of(FINE), []),
        (run_of(at("actor/entropy", {4: math.inf})), [("5", "actor/entropy is not finite")]),
        (run_of(at("actor/grad_norm", {20: 9.0})), [("21", "actor/grad_norm: over 10 times")]),
        (run_of(at("actor/entropy", {28: 0.05, 29: 0.05})), [("29 to 30, 2 steps", "below 10% of its start")]),
        (run_of(COLLAPSED), [("26 to 30, 5 steps", "reward: below 50% of its best")]),
        # Above the lowest reward, a response's -1, that is more than half.
        (run_of({**COLLAPSED, "critic/score/min": [-1] * 30}), []),
        (run_of(at("oar/fallback/any", {2: 0.3, 9: 0.4})), [("3 to 10, 2 steps", "any at 0.4 (fine: 0 to 0.2)")]),
        (run_of(at("oar/answer_found", {0: 0.5})), [("1", "oar/answer_found at 0.5 (fine: 0.8 to 1)")]),
        (run_of(at("oar/ess_ratio", {0: 0.01})), [("1", "oar/ess_ratio at 0.01")]),
        (run_of(at("oar/dump_failed", {7: 1})), [("8", "is the disk full?")]),
        (run_of(at("response_length/clip_ratio", {7: 0.9})), [("8", "responses at data.max_response_length")]),
        (run_of(at(REWARD, {5: np.nan, 6: np.nan})), [("6 to 7, 2 steps", "not in the log")]),
        (run_of(FINE, resumed={12: 3}), [("12", "3 logged steps were repeated")]),
        (run_of(FINE, state="unfinished"), [("30", "calls the run unfinished")]),
        (run_of(FINE, state="finished"), []),
        (run_of(FINE, **{"trainer.total_training_steps": 40}), [("30", "before its last step, 40")]),
        (run_of(FINE, **{"trainer.total_training_steps": "40"}), [("30", "before its last step, 40")]),
        (run_of(FINE, **{"trainer.total_training_steps": "many"}), []),
        (run_of({"x": [1.0]}), []),
    ],
)
def test_what_went_wrong_is_found_at_its_step_and_nothing_else(run, expected):
    found = findings(run)
    assert [when for when, _ in found] == [when for when, _ in expected]
    assert [what for (_, what), (_, said) in zip(found, expected, strict=True) if said not in what] == []


def side(name, rewards, seeds):
    """One run a seed, each with one reward for all of its steps."""
    return Side(name, [run_of({REWARD: [reward] * 3}, seed=seed) for reward, seed in zip(rewards, seeds, strict=True)])


def test_a_step_far_off_costs_no_memory():
    frame = pd.DataFrame({REWARD: [0.1, 0.1]}, index=[1, 10**30])
    ((steps, what),) = findings(RunLog("r", "file", 1, frame, {}, {}))
    assert (steps, what) == (f"2 to {10**30 - 1}, {10**30 - 2} steps", "not in the log")


# Student's t at 97.5 %: 12.7062, 4.3027 and 2.7764 for 1, 2 and 4 degrees of freedom.
@pytest.mark.parametrize(
    ("ours", "seeds", "theirs", "their_seeds", "said"),
    [
        ([0.5, 0.7], [1, 2], [0.3, 0.6], [2, 1], "+0.150 [-3.027, +3.327], paired"),  # of 0.5 - 0.6 and 0.7 - 0.3
        ([0.5, 0.7, 0.9], [1, 2, 3], [0.4, 0.6, 0.8], [4, 5, 6], "+0.100 [-0.353, +0.553], unpaired"),
        ([0.5, 0.7], [None, None], [0.4, 0.6], [None, None], "+0.100 [-0.508, +0.708], unpaired"),
        ([0.5, 0.7], [1, 1], [0.4, 0.6], [1, 1], "+0.100 [-0.508, +0.708], unpaired"),
        ([0.5, 0.7], [[1], 2], [0.4, 0.6], [[1], 2], "+0.100 [-0.508, +0.708], unpaired"),
        ([0.5], [1], [0.4], [1], "+0.100, one run: no interval"),
        ([0.5, 0.7], [1, 2], [0.4], [1], "+0.200, one run: no interval"),
    ],
)
def test_differences_are_paired_where_seeds_pair_up(ours, seeds, theirs, their_seeds, said):
    titles, final, *_ = comparison([side("a", ours, seeds), side("b", theirs, their_seeds)])
    assert titles == ["", "a", "b", "difference, 95 % interval"]
    assert (final[0], final[3]) == ("reward, final", said)


def test_sides_are_compared_over_the_steps_that_all_have_reached_and_drawn_where_all_of_a_side_have():
    short = run_of({REWARD: [0.0, 0.2], "timing_s/step": [5.0, 7.0], "timing_s/gen": [4, 5], "timing_s/oar": [1, 1]})
    seconds = {"timing_s/step": [1, 3, 1], "timing_s/gen": [1, 2, 0], "timing_s/testing": 2}
    long = run_of({REWARD: [0.2, 0.4, 0.9], **seconds})
    both = Side("a", [short, long])
    assert comparison([both])[1:] == [
        ["reward, final", "0.300 (0.200 to 0.400)"],
        ["reward, mean", "0.200 (0.100 to 0.300)"],
        ["reward, best", "0.300 (0.200 to 0.400)"],
        ["seconds per step, median", "4.000 (2.000 to 6.000)"],
    ]
    shown = {panel.title: panel.frames[both] for panel in panels([both])}
    reward = {"mean": [0.1, pytest.approx(0.3)], "lowest": [0.0, 0.2], "highest": [0.2, 0.4]}
    assert shown["Reward"].to_dict("list") == reward
    # Where a run has ended, what it took counts on.
    assert both.seconds().to_dict() == {1: 3.0, 2: 8.0, 3: 9.0}
    # Parts are a step's mean over the runs that have it, and make up the whole, which validation is outside of; OAR's seconds
    # are inside of others.
    phases = {"gen": [2.5, 3.5, 0.0], "testing": [1.0, 1.0, 2.0], "other": [0.5, 1.5, 1.0]}
    assert shown["Seconds by phase"].to_dict("list") == phases


def test_settings_of_runs_whose_folders_share_a_name_stand_beside_each_other():
    sides = [Side("a", [run_of(FINE, lr=1, n=8), run_of(FINE, lr=2, n=8)]), Side("b", [run_of(FINE, lr=1, n=8)])]
    assert config_differences(sides) == [["", "a 1: r", "a 2: r", "b 1: r"], ["lr", "1", "2", "1"]]


# ---- the page


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of two seeds a side, whose metrics are made up."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    runs = {method: [folder / f"{method}<b>{seed}$\\foo$" for seed in (1, 2)] for method in ("oar", "grpo")}
    for method in runs:
        for seed, run in enumerate(runs[method], start=1):
            (run / "metrics").mkdir(parents=True)
            settings = {"data.seed": seed, "algorithm.adv_estimator": f"{method}$\\foo$<script>alert(1)</script>"}
            (run / "run.yaml").write_text(yaml.safe_dump({"state": "finished", "settings": settings}))
            rows = []
            for step in range(1, 31):
                data = {name: float(column[step - 1]) + 0.01 * rng.normal() for name, column in FINE.items()}
                data |= {"timing_s/step": 3.0, "timing_s/gen": 2.0, "timing_s/oar": 0.1, "oar/fallback/no_answer": 0.2}
                data |= {"val-core/aime24/acc/mean@32": step / 40} if step % 10 == 0 else {}
                kept = {name: value for name, value in data.items() if method == "oar" or "oar" not in name}
                rows.append(json.dumps({"step": step, "data": kept}))
            (run / "metrics" / "start.jsonl").write_text("\n".join(rows))
    words = ["report", *runs["oar"], "--baseline", *runs["grpo"], "--out", folder / "out"]
    assert main(list(map(str, words))) == 0
    return folder / "out"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_opens_alone_without_errors_and_fits(report, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    faults, asked = [], []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((report / "report.html").as_uri())
    assert faults == []
    assert len(asked) == 1
    assert page.evaluate("document.documentElement.scrollWidth") == width
    titles = page.locator("h3").all_inner_texts()
    assert titles[:2] == ["Reward", "Accuracy: aime24/acc/mean@32"]
    assert {"Entropy", "ESS ratio", "Gradient norm", "Fallbacks", "Seconds by phase", "Answer found"} < {*titles}
    pictures = page.locator(".pair svg")
    assert pictures.count() == 2 * len(titles) == len(list(report.glob("*.png")))
    colour = page.evaluate("getComputedStyle(document.body).color")
    assert pictures.first.evaluate("svg => getComputedStyle(svg.querySelector('text')).fill") == colour
    page.locator("summary").nth(1).click()
    row = page.locator("details").nth(1).locator("tbody tr").first.all_inner_texts()[0].split()
    assert row == ["10", *["0.25"] * 6]  # mean, lowest and highest of each side
    page.close()
