"""The run, its figures and what the command prints."""

import argparse
import dataclasses
import json

import pytest

from benchmarks.step import report
from benchmarks.step.measure import Candidate, Result, Settings, measure, steps
from benchmarks.tiny.random_models import SHAPES
from oar_plugin.cli import bench

ALL = ["a", "b", "b*", "c", "c*", "d", "d'", "e", "e*", "f"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="oar bench")
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["step", *arguments]))


def fixed(settings: Settings, **seconds: list[float]) -> Result:
    """A result with figures that are easy to check."""
    letters = {"log_prob": "a", "fused": "b", "published": "d", "published_frozen_weights": "d'", "update": "e"}
    letters |= {"fused_checkpointing": "b*", "update_checkpointing": "e*", "bookkeeping": "f"}
    candidates = {}
    for key, values in seconds.items():
        candidates[key] = Candidate(key, letters[key], key, lambda n: None, seconds=values, cpu_seconds=values)
    memory = {"fused": 30, "update": 60, "fused_checkpointing": 45, "update_checkpointing": 36}
    for key, value in memory.items():
        candidates[key].peak_bytes = value
    machine = {"device": "cpu", "accelerator": None, "cpu": "x", "cores": 1, "torch_threads": 1, "torch": "2"}
    machine |= {"transformers": "5", "python": "3", "load_average_before": None, "load_average_after": None}
    return Result(settings, candidates, machine, parameters=5, weight_bytes=20, vocab=10)


@pytest.fixture
def result() -> Result:
    return fixed(
        Settings(),
        log_prob=[1.0, 2.0, 3.0],
        fused=[2.0, 4.0, 6.0],
        fused_checkpointing=[3.5, 7.0, 11.0],
        published=[12.0, 24.0, 36.0],
        published_frozen_weights=[4.0, 12.0, 20.0],
        update=[6.0, 6.0, 6.0],
        update_checkpointing=[8.0, 8.0, 8.0],
        bookkeeping=[0.01, 0.02, 0.03],
    )


def test_ratios_are_of_medians(result):
    value = {t.formula: t.value for t in report.targets(result)}
    assert value["(b - a) / a"] == 1.0
    assert value["(b* - a) / a"] == 2.5
    assert value["mem(b) / mem(e)"] == 0.5
    assert value["mem(b) / mem(e) less gradients"] == 0.75
    assert value["mem(b*) / mem(e*)"] == 1.25
    assert value["d / b"] == 6.0
    assert value["d / (b - a)"] == 12.0
    assert value["(a + d) / b"] == 6.5
    assert value["d' / b"] == 3.0
    assert value["(b - a) / (a + e)"] == 0.25
    assert value["f / a"] == pytest.approx(0.01)


def test_verdicts(result):
    verdict = {t.formula: t.verdict for t in report.targets(result)}
    assert verdict["(b - a) / a"] == "reached"
    assert verdict["(b* - a) / a"] == "NOT reached"
    assert verdict["mem(b) / mem(e)"] == "reached"
    assert verdict["mem(b*) / mem(e*)"] == "NOT reached"
    assert verdict["d / b"] == "reached"
    assert verdict["d' / b"] == "NOT reached"
    assert verdict["f / a"] == "reached"


def test_a_range_is_over_single_rounds(result):
    (target,) = (t for t in report.targets(result) if t.formula == "(b* - a) / a")
    assert target.low == 2.5
    assert target.high == pytest.approx(8 / 3)


@pytest.mark.parametrize("fused", [[4.0, 5.0, 4.0], [2.5, 1.9, 4.0]])
def test_a_target_is_not_judged_where_rounds_disagree(result, fused):
    """(b - a) / a beyond its limit in one round and within it in another, or negative, which cannot be."""
    result.candidates["fused"].seconds = fused
    (target,) = (t for t in report.targets(result) if t.formula == "(b - a) / a")
    assert target.verdict.startswith("not judged: too noisy")


def test_processor_seconds_have_ratios_of_their_own(result):
    result.candidates["fused"].cpu_seconds = [6.0, 6.0, 6.0]
    (target,) = (t for t in report.targets(result) if t.formula == "(b - a) / a")
    assert target.value == 1.0
    assert target.cpu_value == 2.0


def test_a_target_is_judged_only_under_its_conditions(result):
    result.settings = dataclasses.replace(result.settings, size="10m", responses=16, scored_share=0.5)
    verdict = {t.formula: t.verdict for t in report.targets(result)}
    for formula in ("(b - a) / a", "d / b", "f / a"):
        assert verdict[formula].startswith("not judged")


def test_extrapolation_is_said(result):
    result.candidates["published"].scale = 4.0
    result.candidates["published"].limit = 16
    text = report.markdown(result)
    assert "EXTRAPOLATED: d was timed on 16 responses" in text
    assert "24 (extrapolated)" in text


def test_every_candidate_is_measured(tiny):
    told = []
    result = measure(dataclasses.replace(tiny, rounds=3, published_responses=1), told.append)
    assert [c.letter for c in result.candidates.values()] == ALL
    assert len(told) == steps(dataclasses.replace(tiny, rounds=3))
    for candidate in result.candidates.values():
        assert len(candidate.seconds) == 2
        assert (candidate.peak_bytes or 0) > 0 or candidate.letter == "f"
    assert result.candidates["published"].scale == 3.0
    memory = {c.letter: c.peak_bytes for c in result.candidates.values()}
    assert memory["a"] < memory["b"]
    assert memory["b*"] < memory["b"]
    assert memory["c"] < memory["b"]


@pytest.mark.parametrize(("mode", "left"), [("off", "abcdd'ef"), ("on", "ab*c*dd'e*f")])
def test_checkpointing_selects_candidates(tiny, mode, left):
    result = measure(dataclasses.replace(tiny, checkpointing=mode, published_responses=1))
    assert "".join(c.letter for c in result.candidates.values()) == left
    assert report.targets(result)


def test_command_writes_its_reports(tmp_path, capsys):
    small = ("--responses", "2", "--response-length", "40", "--prompt-length", "8", "--answer-length", "2")
    assert run("--size", "tiny", *small, "--rounds", "2", "--checkpointing", "off", "--out", str(tmp_path)) == 0
    content = json.loads((tmp_path / "step_cpu_tiny.json").read_text())
    assert content["settings"]["responses"] == 2
    assert [c["letter"] for c in content["candidates"]] == [x for x in ALL if "*" not in x]
    assert content["machine"]["torch"]
    text = (tmp_path / "step_cpu_tiny.md").read_text()
    assert "(b - a) / a" in text
    assert str(tmp_path) not in text + json.dumps(content)
    assert "ratios and targets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", "1"), "--rounds 1: must be at least 2"),
        (("--scored-share", "0"), "--scored-share 0.0: must be in (0, 1]"),
        (("--responses", "0"), "--responses 0: must be at least 1"),
        (("--importance", "magic"), "--importance magic: unknown; allowed: fisher"),
        (("--importance", "oar_p"), "--importance oar_p: it runs masked copies, not measured here; allowed: fisher"),
        (("--vocab", "9", "--size", "tiny"), "--vocab 9: must be more than"),
        (("--answer-length", "600", "--size", "tiny"), "no room"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for word in ("(b - a) / a", "examples:", "--scored-share", "published"):
        assert word in text


def test_every_setting_has_an_option():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    given = vars(parser.parse_args(["step"]))
    for field in dataclasses.fields(Settings):
        assert given[field.name] == field.default
    for size in SHAPES:
        parser.parse_args(["step", "--size", size])
