"""Whole runs: what may be compared, the figures, the assets, and one real run."""

import argparse
import dataclasses
import json
import statistics

import pytest

from benchmarks.run import assets as assets
from benchmarks.run.measure import (
    NotComparable,
    Phases,
    RunFailed,
    Settings,
    Step,
    check_comparable,
    measure,
    median_interval,
    overrides,
    parse_step,
)
from benchmarks.run.steps import WARM_UP, is_oar
from oar_plugin.cli import bench
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes
from tests.hosts.whole_run import LIMIT_S

SETTINGS = Settings()
WORK = {
    "prompt_length/mean": 32.0,
    "response_length/mean": 128.0,
    "response_length/min": 128.0,
    "response_length/max": 128.0,
    "critic/score/mean": 0.25,
}


def written(step: int, **more: float) -> dict[str, float]:
    """What verl's file logger has of a step of ten seconds."""
    timing = {"gen": 4.0, "old_log_prob": 2.0, "adv": 0.5, "update_actor": 2.5, "update_weights": 0.75, "step": 10.0}
    return {"step": step, **{f"timing_s/{name}": value for name, value in timing.items()}, **WORK, **more}


OAR = {"bench/oar": 1.0, "timing_s/oar": 0.9, "timing_s/bench_host_advantage": 0.4, "oar/scored": 0.5}
GRPO = {"bench/oar": 0.0, "timing_s/bench_host_advantage": 0.5}


def pair(run: int = 1) -> list[Step]:
    return [parse_step(written(3, **OAR), run), parse_step(written(4, **GRPO), run)]


def test_phases_of_an_oar_step_add_up_to_the_step():
    """The gate, 0.1 s, is in verl's timer of the advantage; the other 0.8 s of importance are in that of the log-probs."""
    phases = parse_step(written(3, **OAR), 1).phases
    assert phases.importance == 0.9
    assert phases.advantage == 0.4
    assert phases.log_probs == pytest.approx(2.0 - 0.8)
    assert phases.rest == pytest.approx(0.25)
    assert sum(getattr(phases, name) for name in Phases.names()) == pytest.approx(10.0)


def test_phases_of_a_grpo_step_are_verls():
    phases = parse_step(written(4, **GRPO), 1).phases
    assert (phases.log_probs, phases.importance, phases.advantage) == (2.0, 0.0, 0.5)
    assert parse_step(written(4), 1).phases == phases, "verl's own trainer has no timer of ours"


def test_equal_work_is_comparable():
    check_comparable(SETTINGS, [*pair(1), *pair(2)], control=[parse_step(written(4), 3)])


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, {"oar/scored": 0.25}, "OAR's step 3 of run 1 has oar/scored 0.25 in place of 0.5"),
        (0, {"response_length/min": 100.0}, "OAR's step 3 of run 1 has response_length/min 100 in place of 128"),
        (1, {"response_length/mean": 127.0}, "GRPO's step 4 of run 1 has response_length/mean 127"),
        (1, {"critic/score/mean": 0.5}, "GRPO's step 4 of run 1 has critic/score/mean 0.5 in place of 0.25"),
        (1, {"oar/scored": 0.5}, "a GRPO step scores nothing"),
        (1, {"bench/oar": 1.0, "oar/scored": 0.5}, "not one of each method"),
    ],
)
def test_unequal_work_is_refused(place, change, message):
    lines = [written(3, **OAR), written(4, **GRPO)]
    lines[place] |= change
    with pytest.raises(NotComparable, match=message):
        check_comparable(SETTINGS, [parse_step(line, 1) for line in lines])


def test_an_oar_step_that_tells_no_share_is_refused():
    steps = pair()
    steps[0] = dataclasses.replace(steps[0], scored=None)
    with pytest.raises(NotComparable, match="oar/scored None"):
        check_comparable(SETTINGS, steps)


def test_steps_take_turns_and_each_pair_has_one_of_each():
    order = [is_oar(step) for step in range(1, 15)]
    assert sorted(order[:WARM_UP]) == [False, True], "both methods are warm before anything counts"
    pairs = list(zip(order[WARM_UP::2], order[WARM_UP + 1 :: 2], strict=True))
    assert all(first != second for first, second in pairs)
    assert [first for first, _ in pairs] == [True, False, True, False, True, False], "who is first alternates"


def test_the_interval_of_a_median_is_the_sign_tests():
    """For 12 values the third from below and from above cover the median at 96 %, the fourth at 85 %."""
    values = [float(value) for value in (7, 3, 11, 1, 9, 5, 12, 2, 8, 4, 10, 6)]
    assert median_interval(values) == (3.0, 10.0)
    assert median_interval(values[:6]) == (1.0, 11.0)
    assert median_interval(values[:5]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scored-share", "0.3"), "--scored-share 0.3: must be in (0, 1] and make a whole number of the 4 prompts"),
        (("--scored-share", "0"), "--scored-share 0.0: must be in (0, 1]"),
        (("--n", "1"), "--n 1: must be at least 2"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--micro-batch", "5"), "--micro-batch 5: must divide the 16 responses"),
        (("--response-length", "16"), "--response-length 16: must be at least 32"),
        (("--prompt-length", "4"), "--prompt-length 4: must be at least 8"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.run(parser.parse_args(["run", *arguments])) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_every_setting_has_an_option():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    given = vars(parser.parse_args(["run"]))
    for field in dataclasses.fields(Settings):
        assert given[field.name] == field.default


def test_a_run_that_fails_is_reported_with_the_end_of_its_log(monkeypatch, capsys):
    def fail(settings, progress):
        raise RunFailed(
            "run 1 of 2: verl ended with exit status 1 after 0 of 14 steps. The end of its log:\nKeyError: 'x'"
        )

    monkeypatch.setattr("benchmarks.run.measure.measure", fail)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.run(parser.parse_args(["run"])) == 1
    said = capsys.readouterr()
    assert "KeyError: 'x'" in said.err
    assert "Traceback" not in said.err
    assert "OAR / GRPO" not in said.out


def test_a_failed_run_keeps_its_log_and_tells_its_end(tmp_path, monkeypatch):
    pytest.importorskip("verl")

    def run_verl(arguments, environment, log, timeout, on_line):
        log.write_text("".join(f"line {i}\n" for i in range(100)))
        return 1

    monkeypatch.setattr("oar_plugin.hosts.verl.cpu.session.run_verl", run_verl)
    monkeypatch.setattr("benchmarks.run.measure._check_machine", lambda: None)
    monkeypatch.setattr("benchmarks.run.measure._write_assets", lambda settings, folder: 0)
    monkeypatch.setattr("benchmarks.run.measure.tempfile.mkdtemp", lambda prefix: str(tmp_path))
    with pytest.raises(RunFailed, match="exit status 1 after 0 of 14 steps") as failure:
        measure(Settings())
    assert "line 99" in str(failure.value)
    assert "line 50\n" not in str(failure.value)
    assert (tmp_path / "run_1" / "verl.log").exists()


def test_both_methods_get_the_same_settings_but_for_the_estimator(tmp_path):
    with_oar, alone = (set(overrides(SETTINGS, tmp_path, "run_1", oar, 4)) for oar in (True, False))
    assert alone - with_oar == {"algorithm.adv_estimator=grpo"}
    assert all(override.startswith("algorithm.") for override in with_oar - alone)


def test_each_batch_has_its_share_of_prompts_with_a_signal():
    rows = assets.prompt_rows(steps=3, prompts=8, with_signal=6, prompt_length=16)
    contents = [row["prompt"][0]["content"] for row in rows]
    assert len(set(contents)) == 24, "no step may find another's prefix in a cache"
    assert {len(content) for content in contents} == {16}
    for step in range(3):
        batch = [row["reward_model"]["ground_truth"] for row in rows[8 * step : 8 * step + 8]]
        assert batch.count(assets.SIGNAL) == 6


def test_rewards_differ_only_within_groups_with_a_signal():
    def scores(truth: str, index: int) -> list[float]:
        return [assets.compute_score("", "any text", truth, {"index": index})["score"] for _ in range(4)]

    assert scores(assets.SIGNAL, 10_001) == [0.0, 1.0, 0.0, 1.0]
    assert scores(assets.SIGNAL, 10_002) == [0.0, 1.0, 0.0, 1.0], "each prompt has its own count"
    assert scores(assets.NO_SIGNAL, 10_003) == [0.0] * 4


def test_the_finder_takes_the_last_eight_tokens():
    tokenizer = assets.make_tokenizer(4096)
    assert len(tokenizer) == 4096
    assert len(tokenizer.encode("0000000000000017")) == 16
    words = list(range(1000, 1040))
    segments = segment_tokens(TokenBytes(tokenizer).pieces(words), make_finder([assets.FINDER]), None)
    assert segments is not None
    assert (segments == Segment.ANSWER).nonzero()[0].tolist() == list(range(32, 40))
    assert (segments == Segment.REASONING).sum() == 32


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_real_verl_takes_turns(tmp_path, capsys):
    """One run of real verl, two steps of each method, the first of each thrown away. Importance for chains, on FSDP."""
    pytest.importorskip("vllm")
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    small = ["--size", "1m", "--prompts", "2", "--n", "2", "--prompt-length", "8", "--response-length", "32"]
    measured = ["--micro-batch", "4", "--importance", "onward", "--steps", "1", "--rounds", "1", "--out", str(tmp_path)]
    assert bench.run(parser.parse_args(["run", *small, *measured])) == 0
    content = json.loads((tmp_path / "run_cpu.json").read_text())
    oar, grpo = content["steps"]
    assert (oar["oar"], oar["step"], grpo["oar"], grpo["step"]) == (True, 3, False, 4)
    assert oar["scored"] == 0.5
    assert oar["phases"]["importance"] > 0 == grpo["phases"]["importance"]
    for step in (oar, grpo):
        assert min(seconds for name, seconds in step["phases"].items() if name != "rest") >= 0
        assert step["phases"]["rest"] == pytest.approx(0, abs=0.2 * step["seconds"])
        assert step["cpu_seconds"] > 0
    assert content["ratios"][0]["value"] == statistics.median([oar["seconds"] / grpo["seconds"]])
    assert "too few pairs" in (tmp_path / "run_cpu.md").read_text()
    assert "OAR / GRPO" in capsys.readouterr().out
