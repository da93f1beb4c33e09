"""The candidates of masked copies compute the same; what is scaled, the page and the command."""

import json

import pandas as pd
import psutil
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.offload import scoring, study
from benchmarks.offload.on_engine import OnEngine
from benchmarks.offload.scoring import InTorch, Response, Run, copies_that_fit, made_responses, of_budget, scale_of
from benchmarks.offload.study import RATIOS, disagreements
from benchmarks.ratios import ratio_table
from oar_plugin.passes.masked_copies import Candidate

SMALL = [
    "--size=1m",
    "--responses=2",
    "--prompt-length=8",
    "--answer-length=2",
    "--threads=1",
    "--response-length",
    "40",
]


def test_units_are_spread_evenly():
    response = Response(0, Candidate(torch.arange(12), 0, 10), (True,) * 10)
    every = [(t,) for t in range(10)]
    assert response.units(1, None) == response.units(1, 10) == response.units(1, 11) == every
    assert response.units(8, 2) == [tuple(range(8)), (8, 9)]
    for at_most in (1, 2, 5, 9):
        chosen = response.units(1, at_most)
        assert len(chosen) == at_most
        assert chosen == sorted(set(chosen))
        assert abs(sum(t for (t,) in chosen) / at_most - 4.5) <= 0.5


def test_responses_end_with_their_answer(passes):
    for response in made_responses(passes):
        row_L, answer_L = passes.batch.token_BL[response.row], passes.batch.answer_BL[response.row]
        token_T, start = response.candidate.token_T, response.candidate.answer_start
        assert torch.equal(row_L[: len(token_T)], token_T)
        assert answer_L.nonzero()[:, 0].tolist() == list(range(start, len(token_T)))
        assert len(response.reasoning) == len(row_L) - passes.batch.prompt_length
        assert sum(response.reasoning) == len(response.units(1, None))


def test_seconds_are_scaled_by_tokens():
    run, response = Run(fixed_s=2.0), Response(0, Candidate(torch.arange(100), 0, 90), (True,) * 30)
    assert scale_of(response, 1, 10) == 3
    run.add(response, torch.zeros(30), 3.0, copies=10, tokens=100 + 500)
    assert (run.copies, run.all_copies, run.all_tokens) == (10, 30, 100 + 1500)
    assert run.all_seconds(8.0) == 2.0 + 6.0 * 1600 / 600
    assert Run().all_seconds(8.0) == 8.0
    assert (of_budget(None), of_budget(30)) == (None, 100)


def test_published_and_ours_agree_whatever_the_batch(passes):
    responses = made_responses(passes)
    ours = InTorch(passes, 0, 1).score(responses, None)
    for at_once in (1, 5, 1000):
        theirs = InTorch(passes, 0, at_once).score(responses, None, published=True)
        for a, b in zip(theirs.importance, ours.importance, strict=True):
            assert b.max() > 0
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * b.max().item())
        assert theirs.copies == ours.copies == sum(sum(r.reasoning) for r in responses)
        assert theirs.tokens == sum((1 + sum(r.reasoning)) * len(r.candidate.token_T) for r in responses)
        assert sum(len(r.candidate.token_T) for r in responses) < ours.tokens < theirs.tokens


def test_published_batch_fits_into_memory(passes, monkeypatch):
    monkeypatch.setattr(scoring, "free_bytes", lambda device: 2 * 4 * 1024 * 100 * 50)
    assert 25 < copies_that_fit(passes.model, 100) < 50, "logits alone would be 50 copies of half of the memory"
    assert copies_that_fit(passes.model, 10**9) == 1


def test_hybrid_runs_a_share_of_the_copies_and_says_what_it_measured(passes):
    responses, local = made_responses(passes), InTorch(passes, 0, 1)
    exact, hybrid, capped = (
        local.score(responses, None),
        local.score(responses, None, hybrid=True),
        local.score(responses, 3, hybrid=True),
    )
    assert 0.3 <= hybrid.copies / exact.copies < 0.35
    assert hybrid.fixed_s > 0
    assert hybrid.all_copies == hybrid.copies
    assert capped.copies == 3 * len(responses) < capped.all_copies
    assert local.score(responses[:1], 3, hybrid=True).copies == 3


def test_disagreement_is_relative_to_the_largest_score():
    ours_L = torch.tensor([0.0, 1.0, 4.0])
    found = disagreements({"p": ours_L + torch.tensor([0.0, 0.0, 2e-4]), "l": ours_L}, 1e-4)
    assert found == {"p": pytest.approx(5e-5, rel=1e-2)}
    for wrong_L in (ours_L + 1e-3, ours_L * float("nan")):
        with pytest.raises(RuntimeError, match="o and l differ"):
            disagreements({"o": wrong_L, "l": ours_L}, 1e-4)
    with pytest.raises(RuntimeError, match="all scores are zero"):
        disagreements({"p": ours_L * 0, "l": ours_L * 0}, 1e-4)


def test_ratios_and_verdicts():
    medians = {"p": 12.0, "o": 5.0, "l": 3.0, "l30": 0.9, "o30": 2.1, "g": 2.5, "t0": 9.0, "t15": 10.0, "t100": 30.0}
    figures = pd.DataFrame({letter: [value] * 6 for letter, value in medians.items()})
    rows = {row[0].strip("`"): (row[2], row[5]) for row in ratio_table("", RATIOS, figures).rows}
    assert rows["p / o"] == ("2.4", "NOT reached")
    assert rows["p / l"] == ("4", "for information")
    assert rows["l30 / l"] == ("0.3", "reached")
    assert rows["o30 / o"] == ("0.42", "NOT reached")
    assert rows["o / g"][0] == "2"
    assert rows["t0 / t15"] == ("0.9", "reached")
    assert rows["t0 / t100"] == ("0.3", "for information")


# ---- the command


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setattr(study, "installed", lambda: None)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(("seconds", "everything", "rounds"), [(0.0, False, 2), (1e6, True, 1)])
def test_without_vllm_the_report_says_so(tmp_path, capsys, monkeypatch, seconds, everything, rounds):
    monkeypatch.setattr(study, "AUTO_SECONDS", seconds)
    many = ("48", "--rounds", str(rounds), "--copies-at-most", "auto")
    assert main(["offload", *SMALL, *many, "--out", str(tmp_path)]) == 0
    lengths = json.loads((tmp_path / "perturbation_cpu_1m.json").read_text())["runs"]["lengths"]
    assert list(lengths) == ["40", "48"]
    for length in lengths.values():
        assert set(length["seconds"]) == {"g", "g2", "g3", "p", "l", "l30", "l8"}
        assert all(len(taken) == rounds and min(taken) > 0 for taken in length["seconds"].values())
        for run in length["runs"]["p"]:
            assert (run["copies"] == run["all_copies"]) == everything
            assert run["all_copies"] > 2 * study.PILOT_COPIES
    page, shown = (tmp_path / "perturbation_cpu_1m.md").read_text(), capsys.readouterr().out
    for text in (page, " ".join(shown.split())):
        assert "vLLM is NOT installed" in text
        assert ("SCALED UP at 40 tokens (--copies-at-most auto)" in text) != everything
    assert ("(scaled)" in page) != everything
    assert (tmp_path / "perturbation_cpu_1m.png").stat().st_size > 1000


@pytest.mark.usefixtures("no_vllm")
def test_nothing_is_reported_where_candidates_disagree(tmp_path, monkeypatch, capsys):
    right = InTorch._published

    def wrong(self, candidate, unit_list):
        scores, tokens = right(self, candidate, unit_list)
        return [score * 1.001 for score in scores], tokens

    monkeypatch.setattr(InTorch, "_published", wrong)
    assert main(["offload", *SMALL, "--out", str(tmp_path)]) == 1
    assert "p and l differ by 0.001 of the largest score" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 0", "--rounds 0: must be at least 1"),
        ("--size tiny", "--size tiny: allowed: 1m, 10m"),
        ("--copies-at-most 0", "--copies-at-most 0: must be at least 1"),
        ("--published-copies 0", "--published-copies 0: must be at least 1"),
        ("--response-length 64 64", "each length once"),
        ("--size 1m --response-length 8", "no room"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert main(["offload", *arguments.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_whole_study_on_an_engine(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    compared, exact = [], OnEngine.score

    def remember(self, *arguments, **options):
        compared.append(exact(self, *arguments, **options))
        return compared[-1]

    monkeypatch.setattr(OnEngine, "score", remember)
    before = set(psutil.Process().children(recursive=True))
    few = ("--rounds", "2", "--copies-at-most", "6", "--generating", "2")
    assert main(["offload", *SMALL, *few, "--out", str(tmp_path)]) == 0
    left = [p for p in psutil.Process().children(recursive=True) if p not in before and p.is_running()]
    assert not [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]

    content = json.loads((tmp_path / "perturbation_cpu_1m.json").read_text())
    (length,) = content["runs"]["lengths"].values()
    assert set(length["seconds"]) == set(study.TITLES)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in length["seconds"].values())
    assert [row["ratio"].strip("`") for row in content["tables"]["40 tokens: ratios"]] == [r.formula for r in RATIOS]
    copies = {letter: [run["copies"] for run in runs] for letter, runs in length["runs"].items()}
    assert copies["o"] == copies["l"] == copies["p"] == [12, 12]
    assert copies["t0"] == [0, 0]
    assert min(copies["t100"]) > 0

    # What the engine returned passed; the same numbers, a little off, do not.
    importance_L = compared[0].importance[0]
    with pytest.raises(RuntimeError, match="o and l differ"):
        disagreements({"o": importance_L * 1.001, "l": importance_L}, 1e-4)
