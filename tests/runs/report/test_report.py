"""What a report finds in metrics, how it compares two sides, and its page in a browser."""

import math
from hashlib import sha256

import numpy as np
import pandas as pd
import pytest

from oar_plugin.runs.report.logs import RunLog, findings
from oar_plugin.runs.report.page import HERE, Side, charts, comparison, config_differences, write_report

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


def test_sides_are_compared_over_the_steps_that_all_have_reached():
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
    # From the end of the first step on. Where a run has ended, what it took counts on.
    assert both.seconds().to_dict() == {1: 0.0, 2: 5.0, 3: 6.0}
    shown = {chart.title: chart.data() for chart in charts([both])}
    assert (shown["Reward"]["steps"], shown["Reward"]["runs"]) == ([1, 2, 3], [[[0.0, 0.2, None]], [[0.2, 0.4, 0.9]]])
    # Parts make up the whole, which validation is outside of; OAR's seconds are inside of others. The first step is left out.
    phases = shown["Seconds by phase"]
    assert (phases["steps"], phases["parts"]) == ([2, 3], ["gen", "testing", "other"])
    assert phases["runs"] == [[[5.0, None], [0.0, None], [2.0, None]], [[2.0, 0.0], [2.0, 2.0], [1.0, 1.0]]]
    assert shown["Seconds of OAR"]["runs"] == [[[1.0]], [[None]]]


def test_an_ordinary_comparison_is_a_small_page_of_means_of_consecutive_steps(tmp_path):
    rng = np.random.default_rng(0)
    names = [*FINE, "oar/top10_mass", "val-core/a/mean@1", *(f"timing_s/{part}" for part in ("step", "oar", *"abcde"))]
    runs = [run_of({name: rng.random(500) for name in names} | {REWARD: np.arange(500.0)}) for _ in range(3)]
    sides = [Side("a", runs), Side("b", [*runs[:2], run_of({REWARD: [0.0, 1.0, 2.0]})])]
    assert write_report(sides, tmp_path).page.stat().st_size < 400_000
    shown = charts(sides)[0].data()
    assert shown["steps"] == [*range(2, 501, 2)]
    assert [shown["runs"][run][0][:3] for run in (0, 5)] == [[0.5, 2.5, 4.5], [0.5, 2.0, None]]


def test_settings_of_runs_whose_folders_share_a_name_stand_beside_each_other():
    sides = [Side("a", [run_of(FINE, lr=1, n=8), run_of(FINE, lr=2, n=8)]), Side("b", [run_of(FINE, lr=1, n=8)])]
    assert config_differences(sides) == [["", "a 1: r", "a 2: r", "b 1: r"], ["lr", "1", "2", "1"]]


# ---- the page


def test_the_chart_library_is_what_npm_pack_uplot_1_6_32_has():
    digests = {file.name: sha256(file.read_bytes()).hexdigest() for file in (HERE / "uplot").iterdir()}
    assert digests == {
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of two seeds a side, whose metrics are made up; the second of GRPO lacks the last accuracy."""
    rng, sides = np.random.default_rng(0), []
    for method, last in (("oar", 30), ("grpo", 20)):
        runs = []
        for seed in (1, 4):
            kept = [name for name in FINE if method in name or "oar" not in name]
            metrics = {name: FINE[name] + 0.01 * rng.normal(size=30) for name in kept}
            metrics |= {"timing_s/step": [3.0] * 30, "timing_s/gen": [seed] * 30, f"{method}/fallback/cut": [0.2] * 30}
            known = {step: seed * step / 40 for step in (10, 20, 30 if seed == 1 else last)}
            metrics["val-core/aime24/acc/mean@32"] = [known.get(step, np.nan) for step in range(1, 31)]
            runs.append(run_of(metrics, f"{method}<b>", seed))
        sides.append(Side(f"{method}<script>alert(1)</script>", runs))
    return write_report(sides, tmp_path_factory.mktemp("report")).page


@pytest.fixture(params=[(1200, "light"), (390, "dark")])
def page(report, opened, request):
    width, scheme = request.param
    page, faults = opened(report.read_text(encoding="utf-8"), (width, 800), color_scheme=scheme)
    yield page
    assert faults == []


def test_the_page_opens_alone_without_errors_and_fits(page):
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    titles = page.locator("h3").all_inner_texts()
    assert titles[:2] == ["Reward", "Accuracy: aime24/acc/mean@32"]
    assert {"Entropy", "ESS ratio", "Gradient norm", "Fallbacks", "Seconds by phase", "Answer found"} < {*titles}
    assert page.locator("section:not(:has(canvas))").count() == 0
    pixels = "document.querySelector('canvas').toDataURL()"
    before = page.evaluate(pixels)
    page.locator("#theme").click()
    assert page.evaluate(pixels) != before


def test_runs_axis_smoothing_and_cursor_change_what_is_read(page):
    reward, accuracy = page.locator("section").nth(0), page.locator("section").nth(1)
    said, row = accuracy.locator(".readout b"), accuracy.locator("tbody tr").first.locator("td")
    assert said.all_inner_texts() == ["last: step 30", "1.875", "1.25"]  # GRPO at step 20, which both runs have
    assert page.locator(".readout").last.locator("b").all_inner_texts() == ["last: step 30", "2.5", "1"]  # gen, other
    accuracy.locator("summary").click()
    row.first.wait_for()  # the browser tells the page afterwards that its table was opened
    assert row.all_inner_texts() == ["10", *["0.625", "0.25", "1"] * 2]  # mean, lowest and highest of each side
    page.locator("[name=run]").first.uncheck()
    assert row.all_inner_texts() == ["10", "1", "0.625", "0.25", "1"]  # one run has no range
    page.locator("[name=run]").last.uncheck()
    assert said.all_inner_texts() == ["last: step 30", "3", "0.75"]
    page.locator("[name=smooth]").fill("21")
    page.locator("[name=seeds][value=runs]").check()
    page.locator("[name=axis][value=seconds]").check()
    assert said.all_inner_texts() == ["last: 87 s, step 30", "2", "0.5"]  # 29 steps of 3 seconds
    for key in ("End", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        reward.locator(".plot").press(key)
    assert reward.locator(".readout b").first.inner_text() == "84 s, step 29"
    accuracy.locator(".u-over").hover()  # in the middle
    accuracy.get_by_text("57 s, step 20").wait_for()
    assert said.all_inner_texts() == ["57 s, step 20", "1.5", "0.375"]
