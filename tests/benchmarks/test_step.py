"""The study of a step: its passes, memory, ratios, verdicts, the page and the command."""

import dataclasses
import json

import pandas as pd
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.count.meter import Meter
from benchmarks.machine import peak_bytes
from benchmarks.statistics import Ratio
from benchmarks.step import study
from benchmarks.step.passes import LeanLogProb, published_importance
from benchmarks.step.study import CANDIDATES, Settings, report_of
from benchmarks.tiny.model import SHAPES
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.passes.gradient import MicroBatchPass
from oar_plugin.passes.plain import packed_rows

WITHOUT_COPIES = [
    name for name, importance in IMPORTANCES.items() if importance.copies is None and not importance.contexts
]
WITHOUT_COPIES.append("python:tests.own_importance:Saliency")


def of(passes, importance):
    passes.request = dataclasses.replace(passes.request, importance=importance)
    return passes


@pytest.mark.parametrize("importance", WITHOUT_COPIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_fused_pass_has_log_softmaxs_log_probs_and_the_importance_of_a_pass_alone(
    passes, importance, checkpointing
):
    token_BL, reasoning_BL = passes.batch.token_BL, passes.segments_BL == Segment.REASONING
    log_prob_BLV = passes.model(input_ids=token_BL).logits.detach().log_softmax(-1)
    want = log_prob_BLV[:, :-1].gather(-1, token_BL[:, 1:, None])[..., 0]
    for scores in (passes.log_prob(), of(passes, importance).fused(checkpointing=checkpointing)):
        torch.testing.assert_close(torch.cat(scores.log_prob)[:, :-1], want, rtol=1e-5, atol=1e-5)
        entropy_BL = -(log_prob_BLV.exp() * log_prob_BLV).sum(-1)
        torch.testing.assert_close(torch.cat(scores.entropy), entropy_BL, rtol=1e-5, atol=1e-5)
    alone_BL = torch.cat(passes.importance_only().importance)
    assert (alone_BL[reasoning_BL] > 0).all()
    assert (alone_BL[~reasoning_BL] == 0).all()
    if not importance_of(importance).noisy:
        atol = 1e-5 * alone_BL.max().item()
        torch.testing.assert_close(torch.cat(scores.importance), alone_BL, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("weight_gradients", [False, True])
def test_published_procedure_agrees_with_ours_for_the_same_noise(passes, weight_gradients):
    """In float64, where the KL's cancellation does not drown the comparison."""
    of(passes, "oar_g").model.double()
    ours_BL = torch.cat(passes.importance_only().importance)
    for ours_L, token_L, segments_L in zip(ours_BL, passes.batch.token_BL, passes.segments_BL, strict=True):
        reasoning_L = segments_L == Segment.REASONING
        one = MicroBatchPass(passes.request, *packed_rows(token_L[None], segments_L[None], None))
        noise_RH = one.noise(0)(passes.model.get_input_embeddings()(token_L).detach())[reasoning_L].double()
        want = published_importance(
            passes.model, token_L, segments_L, noise_RH=noise_RH, weight_gradients=weight_gradients
        )
        torch.testing.assert_close(ours_L[reasoning_L].double(), want, rtol=1e-4, atol=1e-6 * want.max())


def test_importance_computes_no_weight_gradient_and_the_published_code_does(passes):
    seen = []
    for parameter in passes.model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.shape))
    for importance in WITHOUT_COPIES:
        if importance_of(importance).backwards:
            of(passes, importance).fused()
            passes.importance_only(checkpointing=True)
    passes.published(1, weight_gradients=False)
    assert not seen
    assert all(p.grad is None and p.requires_grad for p in passes.model.parameters())
    passes.published(1)
    assert seen
    assert all(p.grad is None for p in passes.model.parameters())


def test_only_the_scored_share_is_scored(passes):
    passes.batch = dataclasses.replace(passes.batch, scored=1)
    scores = passes.fused()
    assert torch.cat(scores.importance).shape[0] == 1
    torch.testing.assert_close(torch.cat(scores.log_prob), torch.cat(passes.log_prob().log_prob), rtol=1e-5, atol=1e-5)
    assert len(passes.published().importance) == 1


def test_update_moves_the_weights_leaves_no_gradient_and_does_not_depend_on_checkpointing(passes):
    passes.model.train()
    gradients = []
    for on in (False, True):
        passes._set_checkpointing(on)
        passes.loss(passes.batch.token_BL).backward()
        gradients.append([p.grad.clone() for p in passes.model.parameters()])
        passes.model.zero_grad()
    torch.testing.assert_close(*gradients)
    before = [p.detach().clone() for p in passes.model.parameters()]
    passes.update()
    assert any((a != b).any() for a, b in zip(before, passes.model.parameters(), strict=True))
    assert all(p.grad is None for p in passes.model.parameters())


def test_lean_log_prob_has_the_gradient_of_log_softmax():
    torch.manual_seed(0)
    logits, label, weight = torch.randn(7, 11, requires_grad=True), torch.randint(0, 11, (7,)), torch.randn(7)
    want = logits.log_softmax(-1).gather(-1, label[:, None])[:, 0]
    have = LeanLogProb.apply(logits * 1, label)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(*(torch.autograd.grad((x * weight).sum(), logits) for x in (have, want)))


def test_the_planted_answer_is_what_the_finder_finds(passes):
    assert passes.batch.token_BL.shape == (3, 8 + 48)
    assert passes.batch.token_BL.max() < SHAPES["tiny"].vocab
    assert torch.equal(passes.segments_BL == Segment.ANSWER, passes.batch.answer_BL)
    assert (passes.segments_BL[:, : passes.batch.prompt_length] == Segment.OUTSIDE).all()
    assert (passes.batch.answer_BL.sum(-1) == 4).all()


def test_live_bytes_follow_what_lives():
    with Meter() as counter:
        counter.begin("work")
        a = torch.ones(1000)
        view = a[:10]
        a.add_(1)
        del a
        assert counter.live == 4000, "the view keeps the storage"
        del view
        assert counter.live == 0
        torch.ones(1000) * 2
    assert max(counter.numbers["work"].values()) == 8000


@pytest.mark.parametrize(("grad", "held"), [(False, 2), (True, 8)])
def test_peak_counts_saved_activations_but_not_what_was_there_before(grad, held):
    weight = torch.randn(100, 100, requires_grad=True)

    def chain() -> None:
        with torch.set_grad_enabled(grad):
            x = weight * 1
            for _ in range(8):
                x = x.exp()  # keeps its result for the backward

    assert peak_bytes(chain, torch.device("cpu")) == held * 4 * 100 * 100


def fixed(settings=None, cpu=None, timed_on=None, **changed):
    """The report of figures that are easy to check, and its ratios by formula."""
    once = {"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 6.0], "b*": [3.5, 7.0, 11.0], "d": [12.0, 24.0, 36.0]}
    once |= {"d'": [4.0, 12.0, 20.0], "e": [6.0] * 3, "e*": [8.0] * 3, "f": [0.01, 0.02, 0.03]}
    seconds = {letter: 2 * rounds for letter, rounds in (once | changed).items()}
    peaks = {"b": 30, "e": 60, "b*": 45, "e*": 36, "gradients": 20}
    runs = {"seconds": seconds, "cpu_seconds": cpu or seconds, "peak_bytes": peaks, "timed_on": timed_on or {}}
    runs["flops"] = {letter: 0.0 if letter == "f" else 2.0 for letter in seconds}
    report = report_of(settings or Settings(), {**runs, "parameters": 5}, "cpu")
    return report, {row[0].strip("`"): row[2:] for row in report.tables[1].rows}


def test_ratios_pair_the_rounds_and_have_verdicts():
    value = {formula: (cells[0].split()[0], cells[3]) for formula, cells in fixed()[1].items()}
    assert value["(b - a) / a"] == ("1", "reached")
    assert value["(b* - a) / a"] == ("2.5", "NOT reached")
    assert value["mem(b) / mem(e)"] == ("0.5", "reached")
    assert value["mem(b) / (mem(e) - gradients)"] == ("0.75", "for information")
    assert value["mem(b*) / mem(e*)"] == ("1.25", "NOT reached")
    assert value["d / b"] == ("6", "reached")
    assert value["d / (b - a)"][0] == "12"
    assert value["(a + d) / b"][0] == "6.5"
    assert value["d' / b"] == ("3", "NOT reached")
    assert value["(b - a) / (a + e)"][0] == "0.25"
    assert value["f / a"] == ("0.01", "reached")
    assert "c / a" not in value
    assert Ratio("d / b", "").of(pd.DataFrame({"d": [12.0, 1.0], "b": [2.0, 1.0]})) == [6.0, 1.0]


def test_a_target_is_judged_where_rounds_agree_and_under_its_conditions():
    elsewhere = Settings(size="10m", responses=16, scored_share=0.5)
    for (_, ratio), formulas, reason in (
        (fixed(b=[4.0, 5.0, 4.0]), ["(b - a) / a"], "the interval holds the limit"),
        (fixed(b=[2.5, 1.9, 4.0]), ["(b - a) / a"], "too noisy, the interval reaches below zero"),
        (fixed(elsewhere), ["(b - a) / a", "d / b", "f / a"], "the target is"),
    ):
        for formula in formulas:
            assert ratio[formula][3].startswith(f"not judged: {reason}")


def test_processor_seconds_have_ratios_of_their_own_and_extrapolation_is_said():
    cpu = dict.fromkeys(["b*", "d", "d'", "e", "e*", "f"], 1.0)
    report, ratio = fixed(cpu={"a": [1.0, 2.0, 3.0], "b": [4.0, 6.0, 9.0], **cpu}, timed_on={"d": 16})
    assert ratio["(b - a) / a"][1] == "2"
    assert "EXTRAPOLATED: d was timed on 16 responses, its seconds multiplied by 64 / 16." in report.notes
    assert tuple(report.tables[0].rows[3][:2]) == ("d: published OAR-G, as its code (extrapolated)", "24")


def test_the_command_measures_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "PUBLISHED_SECONDS", 0.0)
    small = "--size=tiny --responses=4 --response-length=40 --prompt-length=8 --answer-length=2 --micro-batch=2"
    assert main(["step", *small.split(), "--rounds=2", "--out", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "step_cpu_tiny.json").read_text())["runs"]
    assert list(runs["seconds"]) == list(runs["cpu_seconds"]) == list(CANDIDATES)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in runs["seconds"].values())
    assert runs["timed_on"] == {"d": 2, "d'": 2}
    peak = runs["peak_bytes"]
    assert set(peak) == {*CANDIDATES, "gradients"} - {"f"}
    assert max(peak["a"], peak["b*"], peak["c"]) < peak["b"]
    page = (tmp_path / "step_cpu_tiny.md").read_text()
    assert f"Made by `python -m benchmarks step {small} --rounds=2 --out {tmp_path}`." in page
    assert "EXTRAPOLATED: d" in page
