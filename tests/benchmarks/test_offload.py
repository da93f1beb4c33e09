"""The candidates of masked copies compute the same; scaled figures, the page and the command."""

import json

import pandas as pd
import psutil
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.offload import scoring, study
from benchmarks.offload.engine import Engine
from benchmarks.offload.scoring import InTorch, Response, Run, copies_that_fit, made_responses
from benchmarks.offload.study import RATIOS, disagreements
from benchmarks.statistics import ratio_table
from oar_plugin.passes.masked_copies import Candidate

SMALL = ["offload", "--size=1m", "--responses=2", "--prompt-length=8", "--answer-length=2", "--threads=1"]
SMALL += ["--response-length=40"]


def test_units_are_spread_evenly():
    response = Response(Candidate(torch.arange(12), 0, 10), (True,) * 10)
    every = [(t,) for t in range(10)]
    assert response.offered(1, None) == response.offered(1, 10) == response.offered(1, 11) == (every, 1.0)
    assert response.offered(8, 2) == ([tuple(range(8)), (8, 9)], 1.0)
    for at_most in (1, 2, 5, 9):
        chosen, scale = response.offered(1, at_most)
        assert len(chosen) == at_most == 10 / scale
        assert chosen == sorted(set(chosen))
        assert abs(sum(t for (t,) in chosen) / at_most - 4.5) <= 0.5
    assert len(response.offered(1, 2, budget=0.5)[0]) == 4, "so that half of them get a copy"


def test_responses_end_with_their_answer(passes):
    for response, answer_L in zip(made_responses(passes), passes.batch.answer_BL, strict=True):
        candidate = response.candidate
        assert answer_L.nonzero()[:, 0].tolist() == list(range(candidate.answer_start, len(candidate.token_T)))
        assert len(response.reasoning) == len(answer_L) - passes.batch.prompt_length


def test_seconds_are_scaled_by_tokens():
    run, response = Run(seconds=8.0, fixed_s=2.0), Response(Candidate(torch.arange(100), 0, 90), (True,) * 30)
    run.add(response, torch.zeros(30), response.offered(1, 10)[1], copies=10, tokens=100 + 500)
    assert (run.copies, run.all_copies, run.all_tokens) == (10, 30, 100 + 1500)
    assert run.all_seconds() == 2.0 + 6.0 * 1600 / 600
    assert Run(seconds=8.0).all_seconds() == 8.0


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
    responses, score = made_responses(passes), InTorch(passes, 0, 1).score
    exact, hybrid = (score(responses, None, hybrid=on) for on in (False, True))
    capped = score(responses, 3, hybrid=True)
    assert 0.3 <= hybrid.copies / exact.copies < 0.35
    assert hybrid.fixed_s > 0
    assert hybrid.all_copies == hybrid.copies
    assert capped.copies == 3 * len(responses) < capped.all_copies
    assert score(responses[:1], 3, hybrid=True).copies == 3


def test_disagreement_is_relative_to_the_largest_score():
    ours_L = torch.tensor([0.0, 1.0, 4.0])
    largest = disagreements({"p": ours_L + torch.tensor([0.0, 0.0, 2e-4]), "l": ours_L}, 1e-4)
    assert largest == {"p": pytest.approx(5e-5, rel=1e-2)}
    for wrong_L in (ours_L + 1e-3, ours_L * float("nan")):
        with pytest.raises(RuntimeError, match="o and l differ"):
            disagreements({"o": wrong_L, "l": ours_L}, 1e-4)
    with pytest.raises(RuntimeError, match="all scores are zero"):
        disagreements({"p": ours_L * 0, "l": ours_L * 0}, 1e-4)


def test_ratios_and_verdicts():
    medians = {"p": 12.0, "o": 5.0, "l": 3.0, "l30": 0.9, "o30": 2.1, "g": 2.5, "t0": 9.0, "t15": 10.0, "t100": 30.0}
    figures = pd.DataFrame({letter: [value] * 6 for letter, value in medians.items()})
    rows = ratio_table("", RATIOS, figures).rows
    shown = {row[0].strip("`"): row[2] for row in rows}
    assert (shown["p / o"], shown["o / g"], shown["t0 / t15"]) == ("2.4", "2", "0.9")
    verdicts = {row[0].strip("`"): row[5] for row in rows if row[4]}
    assert verdicts == {"l30 / l": "reached", "t0 / t15": "reached", "p / o": "NOT reached", "o30 / o": "NOT reached"}


# ---- the command


@pytest.mark.parametrize("at_most", [None, 6])
def test_without_vllm_its_candidates_are_left_out(tmp_path, monkeypatch, at_most):
    monkeypatch.setattr(study, "installed", lambda: None)
    few = [] if at_most is None else ["--copies-at-most", str(at_most)]
    assert main([*SMALL, *few, "--rounds", "2", "--out", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "perturbation_cpu_1m_40.json").read_text())["runs"]
    assert set(runs["seconds"]) == {"g", "g2", "g3", "p", "l", "l30", "l8"}
    assert all(len(taken) == 2 and min(taken) > 0 for taken in runs["seconds"].values())
    assert all((run["copies"] == run["all_copies"]) == (at_most is None) for run in runs["runs"]["p"])
    assert ("(scaled)" in (tmp_path / "perturbation_cpu_1m_40.md").read_text()) != (at_most is None)


def test_nothing_is_reported_where_candidates_disagree(tmp_path, monkeypatch, capsys):
    right = InTorch._published

    def wrong(self, candidate, unit_list):
        scores, tokens = right(self, candidate, unit_list)
        return [score * 1.001 for score in scores], tokens

    monkeypatch.setattr(study, "installed", lambda: None)
    monkeypatch.setattr(InTorch, "_published", wrong)
    assert main([*SMALL, "--out", str(tmp_path)]) == 1
    assert "p and l differ by 0.001 of the largest score" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def command(process):
    """Its command line; empty where it has ended, even if nobody has waited for it yet."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@pytest.mark.slow
def test_whole_study_on_an_engine(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    exact = Engine.score

    def score(self, *arguments, **options):
        assert len(self.processes) >= 2, "engine and worker: what `rest` looks at, and what is ended"
        assert self.cpu_seconds() > 0
        return exact(self, *arguments, **options)

    monkeypatch.setattr(Engine, "score", score)
    before = set(psutil.Process().children(recursive=True))
    assert main([*SMALL, "--rounds", "2", "--copies-at-most", "6", "--out", str(tmp_path)]) == 0
    left = [command(p) for p in psutil.Process().children(recursive=True) if p not in before]
    assert not [words for words in left if words and "resource_tracker" not in words]

    content = json.loads((tmp_path / "perturbation_cpu_1m_40.json").read_text())
    runs = content["runs"]["runs"]
    assert set(content["runs"]["seconds"]) == set(study.TITLES)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in content["runs"]["seconds"].values())
    assert [row["ratio"].strip("`") for row in content["tables"]["Ratios"]] == [r.formula for r in RATIOS]
    copies = {letter: [run["copies"] for run in each] for letter, each in runs.items()}
    assert copies["o"] == copies["l"] == copies["p"] == [12, 12]
    assert copies["t0"] == [0, 0]
    assert min(copies["t100"]) > 0
    assert set(content["runs"]["disagreement"]) == {"p", "o"}, "the engine was compared before anything was timed"
