"""OAR-P in verl's real FSDP engine against a plain HuggingFace model in float64, one copy at a time.

The engines run in torchrun processes on gloo (see engine/worker.py for what the CPU stands in for). Errors are relative to
the response's largest score.
"""

import pytest

from oar_plugin.credit.diagnostics import Status
from oar_plugin.passes.request import IMPORTANCE, REPORT
from tests.hosts.engine import world
from tests.hosts.engine.launch import error, launch, worst

pytestmark = pytest.mark.slow
pytest.importorskip("verl")

PROBES = ["last", "answer_mean", "answer_joint"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    world.make_model(path)
    return path


@pytest.fixture(scope="module")
def single(folder) -> dict:
    return launch("perturbed", 1, folder)


@pytest.fixture(scope="module")
def double(folder) -> dict:
    return launch("perturbed_double", 2, folder)


@pytest.fixture(scope="module")
def exact(folder) -> dict:
    return world.counterfactual(folder)


def test_the_padding_token_of_the_tests_is_the_tokenizers():
    assert world.make_tokenizer().pad_token_id == world.PAD


@pytest.mark.parametrize("probe", PROBES)
def test_every_probe_equals_single_copies(single, folder, probe):
    assert worst(single[probe], world.counterfactual(folder, probe)) < 1e-5


@pytest.mark.parametrize("case", ["dynamic", "importance_only", "padded", "lora", "checkpointing", "fsdp1"])
def test_every_layout_equals_single_copies(single, exact, case):
    assert worst(single[case], exact) < 1e-5


def test_spans_and_sampled_tokens_equal_single_copies(single, folder):
    assert worst(single["span"], world.counterfactual(folder, span=4)) < 1e-5
    assert worst(single["sampled"], world.counterfactual(folder, sampled=True)) < 1e-5


@pytest.mark.parametrize(("case", "share"), [("blocks", 0.5), ("hybrid", 0.3)])
def test_a_budget_keeps_exact_scores_where_it_runs_copies(single, exact, case, share):
    """At least the most important token is found and exact; estimates stay below it, and none is zero."""
    for row in world.SCORED:
        got, want = single[case][IMPORTANCE][row], exact[row]
        reasoning = want > 0
        hits = ((got - want).abs() < 1e-5 * want.max()) & reasoning
        assert hits.sum() >= 1
        assert hits.sum() <= max(1, share * reasoning.sum() + 1)
        assert (got[reasoning] > 0).all()
        assert not got[~reasoning].any()


def test_two_processes_equal_single_copies(double, exact):
    for result in double["fsdp2"]:
        assert worst(result, exact) < 1e-5


@pytest.mark.parametrize("case", ["blocks", "hybrid"])
def test_budgets_in_two_processes_equal_one(single, double, case):
    for result in double[f"fsdp2_{case}"]:
        for place, row in enumerate(result["rows"]):
            if row in world.SCORED:
                assert error(result[IMPORTANCE][place], single[case][IMPORTANCE][row]) < 1e-5


def test_ulysses_equals_single_copies(double, folder, exact):
    for result in double["ulysses_answer_mean"]:
        assert worst(result, exact) < 1e-5
    want = world.counterfactual(folder, "answer_joint")
    for result in double["ulysses_answer_joint"]:
        assert worst(result, want) < 1e-5
    want = world.counterfactual(folder, sampled=True)
    for result in double["ulysses_sampled"]:
        assert worst(result, want) < 1e-5


def test_bf16_ran_in_bf16(single, exact):
    assert 1e-5 < worst(single["bf16"], exact) < 0.5


def test_status_is_that_of_the_gradient_pass(single):
    assert [Status(int(report[0])).name for report in single["answer_mean"][REPORT]] == world.STATUS


def test_log_probs_are_verls_own(single, double):
    for case in [single["answer_mean"], single["dynamic"], *double["fsdp2"]]:
        assert case["log_probs_error"] == 0
    assert single["hybrid"]["log_probs_error"] < 2e-5
    assert "log_probs" not in single["importance_only"]


def test_no_trace_is_left(single, double):
    names = [*PROBES, "sampled", "blocks", "hybrid", "padded", "lora", "checkpointing", "fsdp1"]
    for case in [*(single[name] for name in names), *(r for results in double.values() for r in results)]:
        assert case["traces"] == []
    assert single["grad_norm"] == single["fresh_grad_norm"] > 0
