"""Figures of a run of launches: medians, ratios, efficiencies, verdicts, and the forms they are written in."""

import csv
import io
import json

import pytest

from benchmarks.scaling import report as report
from benchmarks.scaling.measure import Failed, Launch, Layout, Measured, Settings, distinct, plan_series

MACHINE = {
    "device": "cpu",
    "accelerator": None,
    "cpu": "x",
    "cores": 2,
    "nodes": 1,
    "backend": "gloo",
    "torch_threads": 1,
}
MACHINE |= {"torch": "2", "transformers": "5", "python": "3", "load_average_before": None, "load_average_after": None}


def measured(launch: Launch, slow: float = 1.0, importance: float = 1.0, rounds: int = 5) -> Measured:
    """GRPO takes 4 s times `slow`, OAR so many seconds more; rounds differ by a little, both methods alike."""
    drift = [slow * (1 + 0.01 * number) for number in range(rounds)]

    def phase(seconds: float) -> list[float]:
        return [seconds * each for each in drift]

    grpo = {"log_prob": phase(1.0), "update": phase(3.0)}
    oar = {"log_prob": phase(1.0 + importance), "gate": phase(0.0), "update": phase(3.0)}
    seconds = {"grpo": grpo, "oar": oar}
    return Measured(launch, seconds, seconds, dict(MACHINE), [1.0, 0.5], 10_000_000)


@pytest.fixture
def result() -> report.Result:
    """data, weak: 1, 2, 4 processes; the ratio is 1.25, 1.25 and 1.5. tensor: 1 and 4; 2 failed."""
    series = plan_series(Settings(responses=4), ["data", "tensor"], ["weak"], [1, 2, 4])
    outcomes: dict[Launch, Measured | Failed] = {}
    for launch in distinct(series):
        size = launch.layout.processes
        importance = 2.0 if launch.layout == Layout("fsdp", data=4) else 1.0
        outcomes[launch] = measured(launch, slow=float(size), importance=importance)
        if launch.layout == Layout("megatron", tensor=2):
            outcomes[launch] = Failed(launch, "out of memory")
    return report.Result(Settings(responses=4), series, outcomes)


def test_medians_ratios_and_efficiencies(result):
    one, two, four = report.rows(result, result.series[0])
    assert one.grpo == pytest.approx(4.08)
    assert two.oar == pytest.approx(10.2)
    assert [row.ratio for row in (one, two, four)] == pytest.approx([1.25, 1.25, 1.5])
    assert one.efficiency == pytest.approx((1.0, 1.0))
    assert two.efficiency == pytest.approx((0.5, 0.5)), "weak: as much time would be ideal, and it took twice as long"
    assert four.efficiency == pytest.approx((0.25, 0.25 * 1.25 / 1.5))


def test_strong_efficiency_counts_the_processes(result):
    one, four = report.rows(result, result.series[1])
    assert four.efficiency == pytest.approx((1 / 16, 1 / 16)), (
        "four processes took four times as long for the same batch"
    )
    assert (one.shared, four.shared) == (0.5, 2.0)


def test_the_ratio_is_of_neighbours_in_time(result):
    """A machine twice as slow for one round moves no ratio."""
    launch = result.series[0].base
    for phases in result.outcomes[launch].seconds.values():
        for values in phases.values():
            values[1] *= 2
    assert report.rows(result, result.series[0])[0].ratios == pytest.approx([1.25] * 5)


def test_verdicts(result):
    verdict = {target.name: target.verdict for target in report.targets(result)}
    assert verdict == {
        "data, weak: 2 against 1": "reached",
        "data, weak: 4 against 1": "NOT reached",
        "tensor: 4 against 1": "reached",
    }


def test_no_verdict_where_the_rounds_do_not_tell(result):
    launch = result.series[0].launches[1]
    seconds = result.outcomes[launch].seconds["oar"]["log_prob"]
    seconds[:] = [x * y for x, y in zip(seconds, [0.7, 1.6, 1.0, 1.5, 0.8], strict=True)]
    (target,) = (t for t in report.targets(result) if t.name == "data, weak: 2 against 1")
    assert target.verdict.startswith("not judged: too noisy")


def test_the_interval_holds_the_quotient_and_shrinks_with_more_rounds():
    noisy = [1.0, 1.1, 1.2, 1.3, 1.4]
    few, many = report.interval(noisy, noisy, 0), report.interval(noisy * 20, noisy * 20, 0)
    assert few[0] < 1 < few[1]
    assert many[1] - many[0] < (few[1] - few[0]) / 2
    assert report.interval([1.5] * 3, [1.0] * 3, 0) == (1.5, 1.5)


def test_without_the_base_there_is_neither_efficiency_nor_verdict(result):
    base = result.series[0].base
    result.outcomes[base] = Failed(base, "gone")
    assert [row.efficiency for row in report.rows(result, result.series[0])] == [None, None]
    assert not [t for t in report.targets(result) if t.name.startswith("data")]


def test_control_and_disagreement(result):
    assert report.control(result) == pytest.approx((1.0, 1.0, 1.0))
    assert report.disagreement(result) == 0
    result.outcomes[result.series[1].launches[2]].scores[1] = 0.4
    assert report.disagreement(result) == pytest.approx(0.1)


def test_the_rounds_are_those_that_were_measured(result):
    assert any(note.startswith("5 rounds") for note in report.notes(result))
    launch = result.series[0].base
    result.outcomes[launch] = measured(launch, rounds=8)
    assert any(note.startswith("5 to 8 rounds") for note in report.notes(result))


def test_the_page_says_what_failed_and_that_cores_are_shared(result):
    text = report.markdown(result, "oar bench scaling", "x.png")
    assert "- `megatron:tensor=2`, 4 responses: out of memory" in text
    assert "PROCESSES SHARE CORES" in text
    assert "| megatron:tensor=4 | 4* |" in text
    assert "![" in text
    assert "PROCESSES SHARE CORES" not in "".join(report.notes(only_one_process(result)))


def only_one_process(result: report.Result) -> report.Result:
    series = plan_series(result.settings, ["data"], ["weak"], [1, 2])
    return report.Result(result.settings, series, {launch: result.outcomes[launch] for launch in distinct(series)})


def test_csv_and_json(result):
    lines = list(csv.DictReader(io.StringIO(report.to_csv(result))))
    assert [(line["series"], line["processes"]) for line in lines][-2:] == [("tensor", "1"), ("tensor", "4")]
    assert float(lines[2]["ratio"]) == 1.5
    assert float(lines[0]["oar_log_prob_seconds"]) == pytest.approx(2.04)
    content = json.loads(report.to_json(result, "oar bench scaling"))
    assert content["failed"] == [{"layout": "megatron:tensor=2", "responses": 4, "reason": "out of memory"}]
    assert len(content["launches"]) == 5
    assert {target["verdict"] for target in content["targets"]} == {"reached", "NOT reached"}


def test_plots(result, tmp_path):
    pytest.importorskip("matplotlib")
    assert report.draw(tmp_path / "x.png", result)
    assert (tmp_path / "x.png").stat().st_size > 20_000


def test_nothing_measured(result):
    for launch in result.outcomes:
        result.outcomes[launch] = Failed(launch, "no")
    assert report.notes(result) == ["Nothing was measured."]
    assert report.tables(result)
    assert "## Failed" in report.markdown(result, "x")
