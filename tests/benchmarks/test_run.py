"""The study of whole runs: comparable steps, the figures, the assets, and one real run."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.run import assets, study
from benchmarks.run.study import CONTROL, IMPORTANCE, PHASES, SHOWN, WARM_UP, Settings, check_comparable
from benchmarks.tiny.words import make_tokenizer
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes

WORK = {name: float(value) for name, value in study.expected_work(Settings()).items()}
OAR = {"bench/oar": 1.0, "timing_s/oar": 0.3, "timing_s/old_log_prob": 2.2, "oar/scored": 0.5}
GRPO = {"bench/oar": 0.0}


def step(more: dict[str, float], seconds: float = 10.0, run: str = "run 1 of 1") -> dict:
    """The study's figures of a step that verl's file logger wrote."""
    timing = {"gen": 4.0, "old_log_prob": 2.0, "adv": 0.5, "update_actor": 2.5, "update_weights": 0.75, "step": seconds}
    timing = {f"timing_s/{name}": value for name, value in timing.items()}
    return study.parse_step({"step": 3, **timing, **WORK, **more}, run)


def report(*pairs: tuple[float, float], control=(), **settings):
    """The report of pairs (GRPO, OAR) in seconds; the first method alternates, as in a run."""
    steps = []
    for index, (grpo, oar) in enumerate(pairs):
        steps += [step(GRPO, grpo), step(OAR, oar)][:: 1 if index % 2 else -1]
    return study.report_of(Settings(**settings), steps, list(control), 11_000_000)


def test_phases_add_up_to_the_step():
    grpo = [4.0, 2.0, 0.5, 2.5, 0.75, 0.25, 10.0, 0.0]
    for metrics, want in ((OAR, [4.0, 2.2, 0.5, 2.5, 0.75, 0.05, 10.0, 0.3]), (GRPO, grpo), ({}, grpo)):
        seconds = step(metrics)  # without OAR's metrics the step is of verl's own trainer
        assert [seconds[phase] for phase in SHOWN] == pytest.approx(want)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, {"oar/scored": 0.25}, "OAR's step 3 of run 1 of 1 has oar/scored 0.25 in place of 0.5"),
        (0, {"oar/scored": None}, "oar/scored None"),
        (0, {"response_length/min": 100.0}, "response_length/min 100 in place of 128"),
        (1, {"prompt_length/mean": 31.0}, "GRPO's step 3 of run 1 of 1 has prompt_length/mean 31"),
        (1, {"critic/score/mean": 0.5}, "critic/score/mean 0.5 in place of 0.25"),
        (1, {"oar/scored": 0.5}, "a GRPO step scores nothing"),
        (1, {"bench/oar": 1.0, "oar/scored": 0.5}, "not one of each method"),
    ],
)
def test_unequal_work_is_refused(place, change, message):
    check_comparable(Settings(), [step(OAR), step(GRPO)], control=[step({}, run=CONTROL)])
    lines = [OAR, GRPO]
    lines[place] = lines[place] | change
    with pytest.raises(RuntimeError, match=message):
        check_comparable(Settings(), [step(line) for line in lines])


def test_steps_take_turns_and_each_pair_has_one_of_each():
    order = [assets.is_oar(step) for step in range(1, 15)]
    assert sorted(order[:WARM_UP]) == [False, True], "both methods are warm before anything counts"
    pairs = list(zip(order[WARM_UP::2], order[WARM_UP + 1 :: 2], strict=True))
    assert pairs == [(True, False), (False, True)] * 3, "who is first alternates"


def test_ratios_are_medians_over_pairs_and_the_second_leaves_out_what_is_the_same():
    """The machine was ten times slower during one pair, whose ratio counts as one of three."""
    table, phases = report((10.0, 10.5), (100.0, 106.0), (10.0, 11.0)).tables
    assert [row[2] for row in table.rows] == ["1.06", "1.02"]
    rows = {row[0]: row[1:] for row in phases.rows}
    assert rows["log-probs"] == ["2.000", "20.0%", "2.200", "+0.200", "+2.0%"]
    assert rows[IMPORTANCE] == ["0.000", "0.0%", "0.300", "+0.300", "+3.0%"]
    assert rows["whole step"][3:] == ["+1.000", "+10.0%"]


def test_a_failed_run_keeps_its_log_and_tells_its_end(tmp_path, monkeypatch, capsys):
    pytest.importorskip("vllm")

    def run_verl(arguments, environment, log, timeout, on_line):
        log.write_text("".join(f"line {i}\n" for i in range(100)))
        return 1

    monkeypatch.setattr(study, "run_verl", run_verl)
    monkeypatch.setattr(study, "write_assets", lambda folder, settings: 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["run"]) == 1
    said = capsys.readouterr()
    assert "exit status 1 after 0 of 14 steps" in said.err
    assert "line 99\n" in said.err
    assert "line 50\n" not in said.err
    assert "OAR / GRPO" not in said.out
    (log,) = tmp_path.rglob("verl.log")
    assert len(log.read_text().splitlines()) == 100


def test_both_methods_get_the_same_settings_but_for_the_estimator(tmp_path):
    with_oar, alone = (set(study.overrides(Settings(), tmp_path, tmp_path, 4, name)) for name in ("run", CONTROL))
    assert alone - with_oar == {"algorithm.adv_estimator=grpo"}
    assert all(override.startswith("algorithm.") for override in with_oar - alone)


def test_each_batch_has_its_share_of_prompts_with_a_signal_and_rewards_differ_only_there():
    rows = assets.prompt_rows(steps=3, prompts=8, with_signal=6, length=16)
    assert len({row["prompt"][0]["content"] for row in rows}) == 24, "no step may find another's prefix in a cache"
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert [truths[first : first + 8].count(assets.SIGNAL) for first in (0, 8, 16)] == [6, 6, 6]
    for row, truth in zip(rows, truths, strict=True):
        scores = [assets.compute_score("", "any text", truth, row["extra_info"])["score"] for _ in range(4)]
        assert scores == ([0.0, 1.0, 0.0, 1.0] if truth == assets.SIGNAL else [0.0] * 4)  # each prompt counts its own


def test_prompts_and_answers_have_the_length_that_they_are_said_to_have():
    tokenizer = make_tokenizer(4096)
    prompt = assets.prompt_rows(steps=2, prompts=9, with_signal=1, length=16)[17]["prompt"]
    assert len(tokenizer.apply_chat_template(prompt, return_dict=False)) == 16
    segments = segment_tokens(TokenBytes(tokenizer).pieces(range(1000, 1040)), make_finder([assets.FINDER]), None)
    assert segments.tolist() == [Segment.REASONING] * 32 + [Segment.ANSWER] * 8


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_real_verl_takes_turns(tmp_path, capsys):
    """One run of real verl, two steps of each method, the first of each thrown away. Importance for chains, on FSDP."""
    pytest.importorskip("vllm")
    small = "--size 1m --prompts 2 --n 2 --prompt-length 8 --response-length 32 --micro-batch 4 --steps 1 --rounds 1"
    assert main(["run", *small.split(), "--importance", "decision", "--out", str(tmp_path)]) == 0
    oar, grpo = json.loads((tmp_path / "run_cpu.json").read_text())["runs"]["steps"]
    assert (oar["oar"], oar["step"], grpo["oar"], grpo["step"]) == (True, 3, False, 4)
    assert oar[IMPORTANCE] > 0 == grpo[IMPORTANCE]
    for each in (oar, grpo):
        assert min(each[phase] for phase in PHASES) >= 0
        assert each["rest"] == pytest.approx(0, abs=0.2 * each["whole step"])
    assert "not judged: the target is stated for" in (tmp_path / "run_cpu.md").read_text()
    assert "OAR / GRPO" in capsys.readouterr().out
