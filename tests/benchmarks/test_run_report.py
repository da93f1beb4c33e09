"""What `oar bench run` says about steps whose figures are known."""

import dataclasses
import json

import pytest

from benchmarks.run import report as report
from benchmarks.run.measure import Phases, Result, Settings, Step

MACHINE = {
    "device": "cpu",
    "accelerator": None,
    "cpu": "x",
    "cores": 2,
    "torch_threads": 1,
    "torch": "2",
    "verl": "0.9.1",
}
MACHINE |= {"transformers": "5", "python": "3", "load_average_before": None, "load_average_after": None, "vllm": "0.28"}


def step(number: int, oar: bool, seconds: float, cpu_seconds: float | None = None) -> Step:
    importance = 1.0 if oar else 0.0
    phases = Phases(4.0, 2.0, importance, 0.5, 2.0, 0.25, seconds - 8.75 - importance)
    return Step(1, number, oar, seconds, cpu_seconds, phases, {}, 0.5 if oar else None)


def result(*pairs: tuple[float, float], **settings: object) -> Result:
    """Pairs of (GRPO, OAR) in seconds; as in a run, who is first alternates."""
    steps = []
    for index, (grpo, oar) in enumerate(pairs):
        neighbours = [step(2 * index + 3, False, grpo, grpo), step(2 * index + 4, True, oar, 2 * oar)]
        steps += neighbours if index % 2 else neighbours[::-1]
    return Result(dataclasses.replace(Settings(), **settings), MACHINE, 11_000_000, 32_000, steps, [])


def test_the_ratio_is_the_median_over_pairs_not_of_medians():
    """The machine was ten times slower during one pair: its ratio counts as one of three."""
    wall, _, cpu = report.ratios(result((10.0, 10.5), (100.0, 106.0), (10.0, 11.0)))
    assert wall.value == pytest.approx(1.06)
    assert cpu.value == pytest.approx(2.12)
    assert wall.interval is None


def test_the_second_ratio_leaves_out_phases_that_are_the_same_for_both():
    """OAR's step was slow for another reason (it is in `rest`): its importance is 1 s of GRPO's 10 s."""
    touched = report.ratios(result((10.0, 15.0), (10.0, 15.0)))[1]
    assert touched.value == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("oar_seconds", "verdict"),
    [
        ([10.4, 10.5, 10.6, 10.7, 10.8, 10.9], "reached"),
        ([11.1, 11.2, 11.3, 11.4, 11.5, 11.6], "NOT reached"),
        ([10.4, 10.5, 10.6, 10.7, 10.8, 11.2], "not judged: the interval holds 1.10"),
        ([10.5] * 5, "not judged: fewer than six pairs"),
    ],
)
def test_the_verdict_needs_the_whole_interval(oar_seconds, verdict):
    assert report.verdict(result(*((10.0, seconds) for seconds in oar_seconds))).startswith(verdict)


@pytest.mark.parametrize("settings", [{"importance": "oar_g"}, {"scored_share": 1.0}])
def test_the_target_is_judged_only_for_what_it_is_stated_for(settings):
    pairs = [(10.0, 10.5)] * 6
    assert report.verdict(result(*pairs, **settings)).startswith("not judged: the target is stated for")


def test_phases_are_shares_of_the_step():
    rows = {row.title: row for row in report.phase_rows(result((10.0, 11.0), (10.0, 11.0)))}
    assert rows["generation"].grpo_share == 0.4
    assert rows["generation"].added == 0.0
    assert rows["importance"].oar_share == pytest.approx(1 / 11)
    assert rows["importance"].added_share == pytest.approx(0.1)
    assert rows["whole step"].added == 1.0
    assert sum(row.grpo_share for title, row in rows.items() if title != "whole step") == pytest.approx(1.0)


def test_page_and_json_have_every_figure():
    measured = result((10.0, 10.5), (10.0, 11.0))
    measured.control = [step(3, False, 9.0), step(4, False, 9.0)]
    text = report.markdown(measured, "run_cpu.png")
    for words in (
        "| generation | 4.000 | 40.0% | 4.000 |",
        "1.075",
        "<= 1.10",
        "run_cpu.png",
        "9.000 s a step, 0.90 of",
    ):
        assert words in text
    content = json.loads(report.to_json(measured))
    assert [entry["seconds"] for entry in content["steps"]] == [10.5, 10.0, 10.0, 11.0]
    assert len(content["control"]) == 2
    assert content["target"]["limit"] == 1.1


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    assert report.draw(tmp_path / "plot.png", result(*[(10.0, 10.5)] * 7))
    assert (tmp_path / "plot.png").stat().st_size > 10_000
