"""The candidates of `oar bench perturbation`, its arithmetic, its page and its command."""

import argparse
import dataclasses
import json

import pytest
import torch

from benchmarks.offload import measure as perturbation
from benchmarks.offload import report as perturbation_report
from benchmarks.offload.beside import DEFAULT_SHARE, Beside
from benchmarks.offload.measure import (
    LETTERS,
    DisagreementError,
    LengthResult,
    Measured,
    Result,
    Settings,
    disagreements,
    measure,
    steps,
)
from benchmarks.offload.scoring import LocalScoring, OffloadedScoring, Run, of_budget
from benchmarks.responses import evenly_spaced, made_responses
from benchmarks.step.passes import Passes
from benchmarks.step.published import copies_that_fit
from benchmarks.tiny.random_models import SHAPES
from oar_plugin.cli import bench

SMALL = ("--size", "1m", "--responses", "2", "--response-length", "40", "--prompt-length", "8", "--answer-length", "2")
SMALL += ("--threads", "1")
WITHOUT_ENGINE = ["g", "g2", "g3", "p", "l", "l30", "l8"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="oar bench")
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["perturbation", *arguments]))


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setattr(perturbation, "installed", lambda: None)


# ---- what is measured


@pytest.mark.parametrize("at_most", [1, 2, 5, 9])
def test_units_are_spread_evenly(at_most):
    every = [(t,) for t in range(10)]
    chosen = evenly_spaced(every, at_most)
    assert len(chosen) == at_most
    assert chosen == sorted(set(chosen))
    assert abs(sum(t for (t,) in chosen) / at_most - 4.5) <= 0.5


def test_all_units_where_nothing_is_limited():
    every = [(t,) for t in range(10)]
    assert evenly_spaced(every, None) == evenly_spaced(every, 10) == evenly_spaced(every, 11) == every


def test_responses_end_with_their_answer(passes: Passes):
    for response in made_responses(passes.batch, passes.segments_BL):
        row_L, answer_L = passes.batch.token_BL[response.row], passes.batch.answer_BL[response.row]
        assert row_L[: len(response.token_ids)].tolist() == list(response.token_ids)
        assert answer_L.nonzero()[:, 0].tolist() == list(range(response.answer_start, len(response.token_ids)))
        assert response.length == len(row_L) - passes.batch.prompt_length
        assert sum(response.reasoning) == response.units(1, None).every == len(response.units(1, None).chosen)
        assert response.units(8, 2).every == -(-sum(response.reasoning) // 8)


def test_seconds_are_scaled_by_tokens():
    run = Run([], copies=10, tokens=100 + 500, reference_tokens=100, fixed_s=2.0, every=3.0)
    assert run.all_copies == 30
    assert run.all_tokens == 100 + 1500
    assert run.all_seconds(8.0) == 2.0 + 6.0 * 1600 / 600
    assert Run([]).all_seconds(8.0) == 8.0


def test_a_budget_gets_the_copies_that_are_allowed():
    assert of_budget(None) is None
    assert of_budget(30) == 100


def test_published_and_ours_agree_whatever_the_batch(passes: Passes):
    responses = made_responses(passes.batch, passes.segments_BL)
    ours = LocalScoring(passes, 0).exact(responses, None)
    for at_once in (1, 5, 1000):
        published = LocalScoring(passes, 0, at_once).published(responses, None)
        for a, b in zip(published.importance, ours.importance, strict=True):
            assert b.max() > 0
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * b.max().item())
        assert published.copies == ours.copies == sum(sum(r.reasoning) for r in responses)
        assert published.tokens == sum((1 + sum(r.reasoning)) * len(r.token_ids) for r in responses)
        assert ours.reference_tokens < ours.tokens < published.tokens


def test_published_batch_fits_into_memory(passes: Passes, monkeypatch):
    monkeypatch.setattr("benchmarks.step.published.free_bytes", lambda device: 2 * 4 * 1024 * 100 * 50)
    assert 25 < copies_that_fit(passes.model, 100) < 50, "logits alone would be 50 copies of half of the memory"
    assert copies_that_fit(passes.model, 10**9) == 1


def test_hybrid_runs_a_share_of_the_copies_and_says_what_it_measured(passes: Passes):
    responses = made_responses(passes.batch, passes.segments_BL)
    local = LocalScoring(passes, 0)
    exact, hybrid, capped = local.exact(responses, None), local.hybrid(responses, None), local.hybrid(responses, 3)
    assert 0.3 <= hybrid.copies / exact.copies < 0.35
    assert hybrid.fixed_s > 0
    assert (hybrid.every, capped.every > 1) == (1, True)
    assert capped.copies == 3 * len(responses)
    assert local.hybrid(responses[:1], 3).copies == 3


def test_disagreement_is_relative_to_the_largest_score():
    ours = torch.tensor([0.0, 1.0, 4.0])
    found = disagreements({"published": ours + torch.tensor([0.0, 0.0, 2e-4]), "local": ours}, 1e-4)
    assert found == {"published": pytest.approx(5e-5, rel=1e-2)}
    for wrong in (ours + 1e-3, ours * float("nan")):
        with pytest.raises(DisagreementError, match="o and l differ"):
            disagreements({"offloaded": wrong, "local": ours}, 1e-4)
    with pytest.raises(DisagreementError, match="all scores are zero"):
        disagreements({"published": ours * 0, "local": ours * 0}, 1e-4)


# ---- the page


def fixed(**changes: float) -> LengthResult:
    medians = {"step": 1.0, "published": 12.0, "local": 3.0, "local_hybrid": 1.2, "local_span": 0.5}
    medians |= {"offloaded": 2.0, "offloaded_budget": 0.7, "offloaded_span": 0.3, **changes}
    candidates = {k: Measured(k, k, [s, s * 1.1, s * 0.9], copies=9, tokens=90) for k, s in medians.items()}
    beside = [Beside(None, 2, 50, [1.0, 1.0]), Beside(DEFAULT_SHARE, 2, 50, [1.1, 1.1], [5, 7])]
    return LengthResult(64, candidates, beside, {"published": 1e-7}, 9)


MACHINE = {
    "device": "cpu",
    "accelerator": None,
    "cpu": "x",
    "cores": 1,
    "torch_threads": 1,
    "torch": "2",
    "vllm": "0.28.0",
}
MACHINE |= {"transformers": "5", "python": "3", "load_average_before": None, "load_average_after": None}


def test_targets_are_ratios_of_medians():
    value = {t.formula: t.value for t in perturbation_report.targets(fixed())}
    assert value["p / o"] == 6.0
    assert value["p / l"] == 4.0
    assert value["l30 / l"] == pytest.approx(0.4)
    assert value["o30 / o"] == pytest.approx(0.35)
    assert value["o / g"] == 2.0
    assert value["t/s(0.15) / t/s(alone)"] == pytest.approx(1 / 1.1)


def test_verdicts():
    verdict = {t.formula: t.verdict for t in perturbation_report.targets(fixed(offloaded=5.0, local_hybrid=0.9))}
    assert verdict["p / o"] == "NOT reached"
    assert verdict["l30 / l"] == verdict["t/s(0.15) / t/s(alone)"] == "reached"
    assert verdict["p / l"] == "for information"


def test_what_was_scaled_is_said():
    length = fixed()
    length.candidates["published"].measured = 0.25
    result = Result(Settings(copies_at_most=3), [length], MACHINE, 5, 0.01)
    text = perturbation_report.markdown(result)
    assert "12 (scaled)" in text
    assert "SCALED UP at 64 tokens (--copies-at-most 3)" in text
    assert "p 2 of 9" in text


def test_a_page_has_every_candidate_and_generation_beside_scoring():
    result = Result(Settings(), [fixed(), dataclasses.replace(fixed(), response_length=128)], MACHINE, 5, 0.01)
    text = perturbation_report.markdown(result, "plot.png")
    for letter in set(LETTERS.values()) - {"g1", "g2", "g3"}:
        assert text.count(f"| {letter} |") == 2
    assert text.count("| scoring, share 0.15 (default) | 90.91 |") == 2
    assert "![seconds a response against its length](plot.png)" in text
    assert len(perturbation_report.tables(result)) == 6
    assert json.loads(perturbation_report.to_json(result))["lengths"][1]["response_length"] == 128


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    result = Result(Settings(), [fixed(), dataclasses.replace(fixed(), response_length=128)], MACHINE, 5, 0.01)
    assert perturbation_report.draw(tmp_path / "plot.png", result)
    assert (tmp_path / "plot.png").stat().st_size > 1000


# ---- the command


@pytest.mark.usefixtures("no_vllm")
def test_without_vllm_its_rows_are_left_out_and_the_report_says_so(tmp_path, capsys):
    assert run(*SMALL, "--rounds", "2", "--copies-at-most", "4", "--out", str(tmp_path)) == 0
    content = json.loads((tmp_path / "perturbation_cpu_1m.json").read_text())
    (length,) = content["lengths"]
    assert [c["letter"] for c in length["candidates"]] == WITHOUT_ENGINE
    assert length["generation_beside_scoring"] == []
    assert {c["letter"]: c["measured"] < 1 for c in length["candidates"]}["p"]
    assert all(len(c["seconds"]) == 2 for c in length["candidates"])
    text = (tmp_path / "perturbation_cpu_1m.md").read_text()
    assert "vLLM is NOT installed" in text
    assert str(tmp_path) not in text + json.dumps(content)
    assert "ratios and targets" in capsys.readouterr().out


@pytest.mark.usefixtures("no_vllm")
def test_progress_is_told_as_often_as_announced():
    settings = Settings(
        "1m", responses=2, response_length=(40, 48), prompt_length=8, answer_length=2, rounds=1, threads=1
    )
    told: list[str] = []
    measure(settings, told.append)
    assert len(told) == steps(settings)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(("seconds", "all_of_them"), [(0.0, False), (1e6, True)])
def test_auto_runs_what_the_time_allows(monkeypatch, seconds, all_of_them):
    monkeypatch.setattr(perturbation, "AUTO_SECONDS", seconds)
    settings = Settings("1m", responses=1, response_length=(64,), answer_length=2, rounds=1, threads=1)
    (length,) = measure(dataclasses.replace(settings, copies_at_most="auto")).lengths
    published = length.candidates["published"]
    assert (published.measured == 1) == all_of_them
    assert published.copies > 16, "copies are those of the whole response, however many were run"


@pytest.mark.usefixtures("no_vllm")
def test_nothing_is_reported_where_candidates_disagree(tmp_path, monkeypatch, capsys):
    right = LocalScoring.published

    def wrong(self, responses, at_most):
        found = right(self, responses, at_most)
        return dataclasses.replace(found, importance=[x * 1.001 for x in found.importance])

    monkeypatch.setattr(LocalScoring, "published", wrong)
    assert run(*SMALL, "--out", str(tmp_path)) == 1
    assert "p and l differ by 0.001 of the largest score" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", "0"), "--rounds 0: must be at least 1"),
        (("--generating", "0"), "--generating 0: must be at least 1"),
        (("--copies-at-most", "0"), "--copies-at-most 0: must be at least 1"),
        (("--published-copies", "0"), "--published-copies 0: must be at least 1"),
        (("--response-length", "64", "64"), "each length once"),
        (("--size", "1m", "--response-length", "8"), "no room"),
        (("--size", "1m", "--vocab", "9"), "--vocab 9: must be more than"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for word in ("examples:", "--copies-at-most", "o30", "published", "backlog"):
        assert word in text


def test_every_setting_has_an_option():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    given = vars(parser.parse_args(["perturbation"]))
    for field in dataclasses.fields(Settings):
        default = tuple(given[field.name]) if field.name == "response_length" else given[field.name]
        assert default == field.default
    for size in set(SHAPES) - {"tiny"}:  # whose heads vLLM does not serve on a CPU
        parser.parse_args(["perturbation", "--size", size])
    assert parser.parse_args(["perturbation", "--copies-at-most", "auto"]).copies_at_most == "auto"


# ---- with an engine


@pytest.mark.slow
def test_whole_bench_on_an_engine(tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    pytest.importorskip("vllm")
    compared: list[Run] = []
    exact = OffloadedScoring.exact

    def remember(self, *arguments):
        compared.append(exact(self, *arguments))
        return compared[-1]

    monkeypatch.setattr(OffloadedScoring, "exact", remember)
    before = set(psutil.Process().children(recursive=True))
    few = ("--rounds", "2", "--copies-at-most", "6", "--generating", "2")
    assert run(*SMALL, *few, "--out", str(tmp_path)) == 0

    left = [p for p in psutil.Process().children(recursive=True) if p not in before and p.is_running()]
    assert not [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]
    (length,) = json.loads((tmp_path / "perturbation_cpu_1m.json").read_text())["lengths"]
    assert [c["letter"] for c in length["candidates"]] == list(LETTERS.values())
    assert all(len(c["seconds"]) == 2 and min(c["seconds"]) > 0 for c in length["candidates"])
    assert [b["share"] for b in length["generation_beside_scoring"]] == [None, DEFAULT_SHARE, 1.0]
    assert "p / o" in [t["formula"] for t in length["targets"]]
    of = {c["letter"]: c for c in length["candidates"]}
    assert of["o"]["copies"] == of["l"]["copies"] == of["p"]["copies"]
    assert length["generation_beside_scoring"][0]["copies"] == [0, 0]
    assert min(length["generation_beside_scoring"][2]["copies"]) > 0

    # What the engine returned passed; the same numbers, a little off, do not.
    importance_L = compared[0].importance[0]
    disagreements({"offloaded": importance_L, "local": importance_L}, 1e-4)
    with pytest.raises(DisagreementError):
        disagreements({"offloaded": importance_L * 1.001, "local": importance_L}, 1e-4)
