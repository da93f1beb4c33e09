"""Estimators under one signature, what they compute, and how they are judged."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.fidelity import Settings, report_on
from benchmarks.fidelity.attention import _with_pad, principal_coefficients, replaced_key_effect
from benchmarks.fidelity.estimators import REFERENCE, counted_work, loaded_estimators, package_estimators
from benchmarks.fidelity.responses import Response, micro_batches
from benchmarks.fidelity.scores import causal_recall, deletion_curves, mean_over_groups, rank_correlation, top_overlap
from benchmarks.fidelity.sources import Source
from benchmarks.fidelity.tables import BASELINE
from benchmarks.study import silent
from oar_plugin.credit.importance import IMPORTANCES

PAD = 23
ROOT = Path(__file__).parents[2]
SMALL = Settings(tasks=("made", "other"), seeds=1, responses=3, curves=2, micro_batch=2, rounds=1, device="cpu")
ALL = package_estimators() | loaded_estimators([ROOT / "benchmarks/candidates/fidelity/attention.py"])
WORKING = {name: ALL[name] for name in (REFERENCE, "attention", BASELINE, "random")}


def tiny_model(seed=0):
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    config = LlamaConfig(
        vocab_size=24, **sizes, max_position_embeddings=64, initializer_range=0.5, tie_word_embeddings=True
    )
    return LlamaForCausalLM(config).eval()


def response(length, seed=0, correct=True, causal=(2, 4)):
    """Four tokens of prompt, reasoning, a marker, two tokens of answer, one after."""
    prompt, tokens = np.split(np.random.default_rng(seed).integers(0, PAD, length), [4])
    segments = np.array([1] * (length - 8) + [2, 3, 3, 4])
    return Response(prompt.tolist(), "asked", tokens.tolist(), [f" t{i}" for i in tokens], segments, correct, causal)


def source(task="made", seed=0, **known):
    rows = [response(16 + index, index, **({"correct": index != 1} | known)) for index in range(3)]
    return Source(task, seed, tiny_model(seed), PAD, rows, 1, 0.5, 1.0)


def batch_of(*lengths):
    rows = [response(length, seed) for seed, length in enumerate(lengths)]
    ((_, batch),) = micro_batches(rows, len(rows), PAD, torch.device("cpu"), "answer_mean", 0)
    return batch


@pytest.fixture(autouse=True, scope="module")
def _few_estimators():
    """The rest are scored one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.fidelity.tables.package_estimators", lambda: dict(WORKING))
        yield


@pytest.fixture(scope="module")
def report():
    return report_on(SMALL, [source("made"), source("other", seed=1)], silent)


@pytest.mark.parametrize("name", ALL)
def test_a_score_does_not_depend_on_the_batch_around_it(name):
    """Padding and neighbours change nothing, and the model is left as it was."""
    model = tiny_model()
    alone, together = (ALL[name](model, batch)[0] for batch in (batch_of(16), batch_of(16, 21)))
    reasoning = batch_of(16).responses[0].reasoning_R
    torch.testing.assert_close(alone[reasoning].double(), together[reasoning].double(), rtol=2e-3, atol=1e-5)
    assert alone[reasoning].isfinite().all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_importance_of_the_package_is_an_estimator():
    assert {name.split()[0] for name in package_estimators()} == {*IMPORTANCES, "attention"}


PASSES = {
    "fisher 1": (1, 1),
    "fisher 4": (4, 4),
    "oar_g 4": (5, 4),
    "onward 1": (2, 2),
    "entropy": (1, 0),
    "random": (0, 0),
}


@pytest.mark.parametrize("name", PASSES)
def test_work_counts_passes(name):
    model, batch = tiny_model(), batch_of(16, 16)
    with counted_work(model) as work:
        ALL[name](model, batch)
    assert [work[way] / batch.token_BT.numel() for way in ("forward", "backward")] == pytest.approx(PASSES[name])


def test_work_counts_what_copies_compute_behind_their_prefix():
    model, batch = tiny_model(), batch_of(16)
    with counted_work(model) as work:
        ALL[REFERENCE](model, batch)
    assert 1 < work["forward"] / batch.token_BT.numel() < len(batch.responses[0].reasoning_R)


@torch.no_grad()
def test_attention_patching_sees_no_pad_in_the_answer():
    """The PAD that it reads keys from may not change what it is compared with."""
    model, batch = tiny_model(), batch_of(16, 16)
    token, position, mask = _with_pad(batch, torch.float32)
    beside = model(input_ids=token, position_ids=position, attention_mask=mask[:, None]).logits[:, :-1]
    torch.testing.assert_close(beside, model(input_ids=batch.token_BT).logits, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 1000), st.sampled_from([0.3, 3.0, 30.0]), st.sampled_from([2, 5, 256]))
@settings(max_examples=25)
def test_the_effect_is_what_happens_when_key_and_value_are_replaced(seed, sharpness, chunk):
    """Also where the softmax is saturated, which a gradient cannot see."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, gradient, other_key, other_value = torch.randn(6, 2, 7, 4, generator=generator)
    query = query * sharpness

    def attend(key, value):
        return (query @ key.mT).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf).softmax(-1) @ value

    effect, bound = replaced_key_effect(query, key, value, gradient, other_key, other_value, chunk=chunk)
    for t in range(7):
        here = torch.arange(7)[:, None] == t
        change = (attend(key.where(~here, other_key), value.where(~here, other_value)) - attend(key, value))[:, t + 1 :]
        later = gradient[:, t + 1 :]
        torch.testing.assert_close(effect[:, t], (later * change).sum((1, 2)), rtol=1e-3, atol=1e-3)
        want = (later.square().sum(-1) * change.square().sum(-1)).sum(1)
        torch.testing.assert_close(bound[:, t], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_principal_coefficients_carry_the_largest_eigenvalue(scale):
    """`c` is a direction of the logits; what counts is how much of the Fisher matrix lies along it."""
    logits = scale * torch.randn(20, 12, generator=torch.Generator().manual_seed(3))
    p = logits.double().softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    got, largest = principal_coefficients(logits).double(), torch.linalg.eigvalsh(fisher)[:, -1]
    assert (torch.einsum("bv,bvw,bw->b", got, fisher, got) / got.square().sum(-1) > 0.97 * largest).all()
    torch.testing.assert_close(got.square().sum(-1), largest, rtol=0.05, atol=1e-9)


def test_rank_correlation_overlap_and_recall():
    """Spearman's by hand: ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4."""
    score, reference = torch.tensor([0.0, 5.0, 5.0, 9.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert rank_correlation(score, reference) == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    assert rank_correlation(torch.ones(4), reference) == 0.0
    assert math.isnan(rank_correlation(score, torch.ones(4)))
    ten = torch.arange(10.0)
    assert top_overlap(ten.where(ten > 0, 99.0), ten) == 0.5
    keep, causal = torch.tensor([[True, True, True, True, False]]), torch.tensor([[False, True, True, False, False]])
    importance = torch.tensor([[0.1, 5.0, 0.2, 4.0, 9.0]])
    assert causal_recall(importance, keep, causal).item() == 0.5
    assert causal_recall(importance, keep, ~keep).isnan().all()


def test_deletion_falls_faster_when_what_matters_goes_first():
    model, batch = tiny_model(), batch_of(40)
    exact = ALL[REFERENCE](model, batch)[0, batch.responses[0].reasoning_R]
    curves = deletion_curves(model, batch.responses[0], {"best": exact, "same": exact.clone(), "worst": -exact}, PAD)
    assert curves["best"][0] == 1.0
    assert curves["best"] == curves["same"] != curves["worst"]


def test_intervals_hold_groups_together():
    """Two groups that differ a lot: the interval is about the scatter within them, not between."""
    mean = mean_over_groups([[0.0, 0.1, math.nan] * 20, [1.0, 0.9] * 20])
    assert (mean.value, mean.count) == (pytest.approx(0.5), 80)
    assert mean.high - mean.low < 0.05
    assert mean_over_groups([[0.0, 1.0], [0.5]]).high < 1
    assert math.isnan(mean_over_groups([[math.nan]]).value)


def test_the_report_holds_every_estimator_and_single_figure(report, tmp_path):
    written = {path.suffix: path for path in report.write(tmp_path)}
    text, page, runs = (
        written[".md"].read_text(),
        written[".html"].read_text(),
        json.loads(written[".json"].read_text())["runs"],
    )
    for name in WORKING:
        assert f"| {name} |" in text
        assert name in page
    assert len(runs["judged"]) == 4
    exact = runs["judged"]["made 0 float32"][REFERENCE]
    assert (exact["overlap"], exact["spearman"]) == ([1.0] * 3, [1.0] * 3)
    assert len(runs["judged"]["made 0 bfloat16"][BASELINE]["overlap"]) == 3
    assert all("reached" in row[-1] or "not judged" in row[-1] for row in report.tables[1].rows)
    assert "known to be causal" in page
    assert "http" not in page.replace("http-equiv", ""), "one file, no request"


def test_without_truth_there_are_no_columns_of_it():
    text = report_on(replace(SMALL, dtypes=("float32",)), [source(correct=None, causal=None)], silent).markdown(None)
    assert "recall" not in text
    assert "answer |" not in text


def test_bfloat16_alone_is_held_against_float32(report):
    """The same figures as when float32 ran before it."""
    alone = report_on(replace(SMALL, dtypes=("bfloat16",)), [source()], silent).runs["judged"]["made 0 bfloat16"]
    both = report.runs["judged"]["made 0 bfloat16"]
    assert alone["attention"] == both["attention"]


def test_an_estimator_of_ones_own_is_judged_and_a_broken_one_left_out(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def length(model, batch):\n    '''Later is better.'''\n"
        "    return torch.arange(batch.token_BT.shape[1]).expand(batch.token_BT.shape).float()\n"
        "ESTIMATORS = {'|later|': length, 'broken': lambda model, batch: torch.zeros(3)}\n"
    )
    report = report_on(replace(SMALL, also=(file,), dtypes=("float32",), curves=0), [source()], silent)
    assert r"| \|later\| |" in report.markdown(None), "a bar may not end a cell"
    assert "`|later|`: Later is better." in report.notes
    assert any("LEFT OUT: broken" in note and "expected (2, 17)" in note for note in report.notes)
