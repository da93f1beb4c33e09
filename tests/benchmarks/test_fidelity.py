"""Estimators under one signature, what they compute, and how they are judged."""

import dataclasses
import json
import math

import pytest
import torch

from benchmarks.fidelity import report as report
from benchmarks.fidelity.estimators import (
    REFERENCE,
    Work,
    by_importance,
    load_estimators,
    package_estimators,
)
from benchmarks.fidelity.measure import Settings, estimators, measure, pieces_of_work
from benchmarks.fidelity.page import html
from benchmarks.fidelity.responses import MicroBatch, micro_batches
from benchmarks.fidelity.scores import (
    causal_recall,
    deletion_curve,
    mean_over_groups,
    rank_correlation,
    recall,
    top_overlap,
)
from oar_plugin.credit.importance import IMPORTANCES, Forward
from oar_plugin.passes.gradient import MicroBatchPass
from oar_plugin.passes.plain import packed_rows
from oar_plugin.passes.request import Request
from oar_plugin.passes.taps import ModelTaps
from tests.bench.fidelity_model import PAD, response, source, tiny_model

SMALL = Settings(tasks=("made", "other"), seeds=1, responses=3, curves=2, micro_batch=2, rounds=1, device="cpu")


def batch_of(*lengths: int) -> MicroBatch:
    rows = [response(length, seed) for seed, length in enumerate(lengths)]
    ((_, batch),) = micro_batches(rows, len(rows), PAD, 0, torch.device("cpu"))
    return batch


@pytest.fixture(autouse=True, scope="module")
def _few_estimators():
    """The rest are scored one by one."""
    few = [e for e in package_estimators() if e.name in (REFERENCE, "attention", report.BASELINE, "random")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.fidelity.measure.package_estimators", lambda: list(few))
        yield


@pytest.fixture(scope="module")
def result():
    sources = iter([source("made"), source("other", seed=1)])
    return measure(SMALL, sources, lambda what: None)


# ---- estimators


@pytest.mark.parametrize("estimator", package_estimators(), ids=lambda estimator: estimator.name)
def test_a_score_does_not_depend_on_the_batch_around_it(estimator):
    """Padding and neighbours change nothing, and the model is left as it was."""
    model = tiny_model()
    alone, together = batch_of(16), batch_of(16, 21)
    score = estimator.score(model, alone)[0]
    beside = estimator.score(model, together)[0, : len(score)]
    reasoning = alone.reasoning_BT[0]
    torch.testing.assert_close(score[reasoning].double(), beside[reasoning].double(), rtol=2e-3, atol=1e-5)
    assert score[reasoning].isfinite().all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_importance_of_the_package_is_an_estimator():
    names = {estimator.name.split()[0] for estimator in package_estimators()}
    assert names == {*IMPORTANCES, "attention"}


def test_fisher_is_the_gradient_of_a_plain_backward():
    model, batch = tiny_model().requires_grad_(False), batch_of(18)
    packed, layout = packed_rows(batch.token_BT, batch.segments_BT, batch.mask_BT)
    tap = MicroBatchPass(Request("fisher", seed=batch.seed), packed, layout).tap(Forward(0))
    embedding = model.get_input_embeddings()(batch.token_BT).detach().requires_grad_(True)
    hidden = model.model(inputs_embeds=embedding).last_hidden_state[0]
    tap.probe(model.lm_head, hidden[tap.row_position_N]).backward()
    want = embedding.grad.square().sum(-1) * batch.reasoning_BT
    torch.testing.assert_close(by_importance(model, batch, "fisher"), want)


def test_exact_copies_are_what_a_plain_forward_says():
    model, batch = tiny_model(), batch_of(15)
    scores = by_importance(model, batch)[0]
    start, end = batch.responses[0].answer
    with torch.no_grad():

        def outcome(token_T):
            return model(input_ids=token_T[None]).logits[0, start - 1 : end - 1].mean(0).double().log_softmax(-1)

        clean = outcome(batch.token_BT[0])
        for t in batch.responses[0].reasoning_R.tolist():
            masked = batch.token_BT[0].clone()
            masked[t] = PAD
            other = outcome(masked)
            assert scores[t].item() == pytest.approx((clean.exp() * (clean - other)).sum().item(), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("fisher 1", 1, 1),
        ("fisher 4", 4, 4),
        ("oar_g 4", 5, 4),
        ("onward 1", 2, 2),
        ("entropy", 1, 0),
        ("random", 0, 0),
    ],
)
def test_work_counts_passes(name, forward, backward):
    model, batch = tiny_model(), batch_of(16, 16)
    (estimator,) = (e for e in package_estimators() if e.name == name)
    with Work(model) as work:
        estimator.score(model, batch)
    assert work.forward / batch.token_BT.numel() == pytest.approx(forward)
    assert work.backward / batch.token_BT.numel() == pytest.approx(backward)


def test_work_counts_what_copies_compute_behind_their_prefix():
    model, batch = tiny_model(), batch_of(16)
    with Work(model) as work:
        by_importance(model, batch, budget=1)  # one share: all of them
    assert 1 < work.forward / batch.token_BT.numel() < len(batch.responses[0].reasoning_R)


def test_attention_patching_sees_no_pad_in_the_answer():
    """The PAD that it reads keys from may not change what it is compared with."""
    from benchmarks.fidelity.attention import _with_pad

    model, batch = tiny_model(), batch_of(16, 16)
    token, position, mask = _with_pad(batch, torch.float32)
    with torch.no_grad():
        beside = model(input_ids=token, position_ids=position, attention_mask=mask[:, None]).logits[:, :-1]
        torch.testing.assert_close(beside, model(input_ids=batch.token_BT).logits, rtol=1e-4, atol=1e-4)


# ---- figures


def test_rank_correlation_with_ties():
    """Spearman's by hand: ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4."""
    score, reference = torch.tensor([0.0, 5.0, 5.0, 9.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert rank_correlation(score, reference) == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    assert rank_correlation(torch.ones(4), reference) == 0.0
    assert math.isnan(rank_correlation(score, torch.ones(4)))


def test_overlap_and_recall():
    reference = torch.arange(10.0)
    score = reference.clone()
    score[0] = 99.0
    assert top_overlap(score, reference) == 0.5
    causal = torch.zeros(10, dtype=torch.bool)
    causal[[9, 3]] = True
    assert recall(reference, causal) == 0.5


def test_deletion_falls_faster_when_what_matters_goes_first():
    model, row = tiny_model(), response(40, 3)
    batch = MicroBatch((row,), row.token_T[None], row.segments_T[None], PAD, "answer_mean", 0)
    exact = by_importance(model, batch)[0, row.reasoning_R]
    curves = deletion_curve(model, row, {"best": exact, "same": exact.clone(), "worst": -exact}, PAD)
    assert curves["best"][0] == 1.0
    assert curves["best"] == curves["same"]
    assert curves["best"] != curves["worst"]


def test_intervals_hold_groups_together():
    """Two groups that differ a lot: the interval is about the scatter within them, not between."""
    mean = mean_over_groups([[0.0, 0.1, math.nan] * 20, [1.0, 0.9] * 20])
    assert mean.value == pytest.approx(0.5)
    assert mean.high - mean.low < 0.05
    assert mean.count == 80
    assert math.isnan(mean_over_groups([[math.nan]]).value)


# ---- the whole


def test_the_reference_agrees_with_itself(result):
    summary = report.Summary(result)
    (exact,) = (row for row in summary.main if row.name == REFERENCE)
    assert exact.means["overlap"].value == 1.0
    assert exact.means["spearman"].value == pytest.approx(1.0)
    assert exact.means["recall_gap"].value == 0.0
    assert {m.dtype for m in result.measured} == {"float32", "bfloat16"}
    assert all(len(m.judged[report.BASELINE]) == 3 for m in result.measured)


def test_pages_hold_every_estimator(result, tmp_path):
    summary = report.Summary(result)
    text = report.markdown(summary, None, "oar bench fidelity")
    content = json.loads(report.to_json(summary, "oar bench fidelity"))
    page = html(summary, None, "oar bench fidelity <x>")
    for estimator in result.estimators:
        assert f"| {estimator.name} |" in text
        assert estimator.name in page
    assert len(content["measured"]) == 4
    assert content["summary"]["float32"][0]["means"]["overlap"]["value"] == 1.0
    assert "<x>" not in page
    assert "known to be causal" in page
    assert "http" not in page.replace("http-equiv", ""), "one file, no request"
    if report.draw(tmp_path / "plot.png", summary):
        assert (tmp_path / "plot.png").stat().st_size > 1000


def test_goals_are_judged_by_the_interval(result):
    lines = report.verdicts(report.Summary(result))
    assert len(lines) == len(report.GOALS)
    assert all("reached" in line for line in lines)


def test_without_truth_there_are_no_columns_of_it():
    plain = source("mine", causal=False)
    plain = dataclasses.replace(
        plain, responses=[dataclasses.replace(row, correct=None) for row in plain.responses], right=None
    )
    settings = dataclasses.replace(SMALL, dtypes=("float32",))
    summary = report.Summary(measure(settings, iter([plain]), lambda what: None))
    text = report.markdown(summary, None, "x")
    assert "recall" not in text
    assert "Right and wrong" not in text


def test_bfloat16_alone_is_held_against_float32():
    """The same figures as when float32 ran before it."""
    both = measure(dataclasses.replace(SMALL, curves=0), iter([source()]), lambda what: None).measured
    alone = measure(dataclasses.replace(SMALL, dtypes=("bfloat16",)), iter([source()]), lambda what: None).measured
    figures = [[(j.spearman, j.overlap) for j in m.judged["attention"]] for m in (*both, *alone)]
    assert figures[1] == figures[2]


# ---- estimators of one's own


def test_an_estimator_of_ones_own_is_judged_and_a_broken_one_left_out(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def length(model, batch):\n    '''Later is better.'''\n"
        "    return torch.arange(batch.token_BT.shape[1]).expand(batch.token_BT.shape).float()\n"
        "def broken(model, batch):\n    return torch.zeros(3)\n"
        "ESTIMATORS = {'|later|': length, 'broken': broken}\n"
    )
    settings = dataclasses.replace(SMALL, also=(file,), dtypes=("float32",), curves=0)
    result = measure(settings, iter([source()]), lambda what: None)
    assert "|later|" in result.measured[0].judged
    assert r"| \|later\| |" in report.markdown(report.Summary(result), None, "x"), "a bar may not end a cell"
    assert "expected (2, 17)" in result.measured[0].failed["broken"]
    assert any("LEFT OUT: broken" in note for note in report.notes(report.Summary(result)))
    assert next(e.about for e in result.estimators if e.name == "|later|") == "Later is better."


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "needs a dictionary ESTIMATORS"),
        ("import nowhere_to_be_found", "cannot be imported"),
        ("ESTIMATORS = {'fisher 1': print}", "is taken"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, complaint):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        estimators(dataclasses.replace(SMALL, also=(file,)))
    with pytest.raises(ValueError, match="not a Python file"):
        load_estimators(tmp_path / "missing.py")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seeds": 0}, "--seeds 0"),
        ({"responses": 1}, "--responses 1"),
        ({"responses_file": "x"}, "belong together"),
        ({"dtypes": ("float16",)}, "--dtypes float16"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(SMALL, **change).check()


def test_progress_is_called_as_often_as_promised():
    calls: list[str] = []
    settings = dataclasses.replace(SMALL, tasks=("made",), curves=0)
    measure(settings, iter([source()]), calls.append)
    assert len(calls) == pieces_of_work(settings)


def test_taps_are_gone_after_an_error():
    model = tiny_model()
    with pytest.raises(RuntimeError), ModelTaps(model):
        raise RuntimeError
    assert not any(module._forward_hooks for module in model.modules())


def test_causal_recall():
    importance = torch.tensor([[0.1, 5.0, 0.2, 4.0, 9.0]])
    keep = torch.tensor([[True, True, True, True, False]])
    causal = torch.tensor([[False, True, True, False, False]])
    assert causal_recall(importance, keep, causal).item() == pytest.approx(0.5)
    assert causal_recall(importance, keep, torch.zeros_like(causal)).isnan().all()
